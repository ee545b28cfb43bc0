from __future__ import annotations

from gpumem_client.wire.protocol import DeviceSample
from gpumem_exporter.events.processes import DeviceUsage
from tests.support.builders import UUIDS


def test_the_mean_counts_time_and_a_long_gap_counts_nothing() -> None:
    usage = DeviceUsage()
    assert usage.row() == dict.fromkeys(usage.row()), "nothing is known"
    usage.take_used(400, 10.0)
    assert usage.row()["used_mean_bytes"] == 400
    usage.take_used(400, 10.0)  # the same reading again
    usage.take_used(200, 20.0)
    usage.take_used(200, 50.0)
    assert usage.row()["used_mean_bytes"] == (300 * 10 + 200 * 30) // 40
    usage.take_used(1000, 5000.0)
    assert usage.row()["used_mean_bytes"] == (300 * 10 + 200 * 30) // 40
    assert usage.row()["used_peak_bytes"] == 1000


def test_the_highest_reserved_peak_outlives_a_reset_and_an_unknown_value() -> None:
    usage = DeviceUsage()
    for peak, idle in ((500, None), (100, 40), (None, 20)):
        usage.take_sample(DeviceSample(UUIDS[0], reserved_peak_bytes=peak, idle_cache_bytes=idle), 1.0)
    assert usage.row()["reserved_highest_bytes"] == 500
    assert usage.row()["idle_cache_mean_bytes"] == 20
