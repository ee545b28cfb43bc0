from __future__ import annotations

import asyncio
import time

from gpumem_client.wire.errors import GpumemError
from gpumem_exporter.cli.fleet.live import FleetTop
from gpumem_exporter.cli.fleet.overview import Overview
from gpumem_exporter.cli.fleet.selection import Failure
from gpumem_exporter.errors import PrometheusError
from tests.support.fleet_builders import A, B
from tests.support.top_documents import device
from tests.support.waiting import patient


def test_the_sums_are_first_and_a_failed_reading_is_above_the_last_devices() -> None:
    failure: list[GpumemError] = []
    devices = {"source": "nvml", "nvml": {"up": True}, "devices": [device("0"), device("1")]}
    overview = Overview({A: devices, B: Failure("failed", "no-answer\x1b[2J")})

    def read() -> Overview:
        if failure:
            raise failure[0]
        return overview

    async def main() -> None:
        app = FleetTop(read, overview, interval_seconds=0.1)
        async with app.run_test(size=(120, 24)) as pilot:

            async def lines(*texts: str) -> list[str]:
                end = time.monotonic() + patient(10)
                while True:
                    shown = [line.text.rstrip() for line in app.screen._compositor.render_strips(app.size)]
                    if all(text in "\n".join(shown) for text in texts):
                        return shown
                    assert time.monotonic() < end, shown
                    await asyncio.sleep(0.02)

            shown = await lines("1 of 2 exporters, 2 devices: 126 GiB of 160 GiB used.", f"{B.instance}: no-answer?[2J")
            sums, *rows = (index for index, line in enumerate(shown) if " devices: " in line or "80.0 GiB" in line)
            assert len(rows) == 2
            assert sums < rows[0]
            failure.append(PrometheusError("prometheus-is-down"))
            shown = await lines("prometheus-is-down", "80.0 GiB")
            failure.clear()
            await pilot.press("q")
        assert app.return_code == 0

    asyncio.run(main())
