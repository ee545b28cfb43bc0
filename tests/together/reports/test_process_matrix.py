"""A process' bytes are shown on the right device, whatever CUDA calls it."""

from __future__ import annotations

import pytest

from tests.conftest import StartExporter
from tests.emulation.fixtures import MakeNode, StartTorch
from tests.emulation.node import MIB
from tests.support.device_truth import scrape
from tests.support.exporter_process import QUICK
from tests.support.waiting import wait_until_equal


@pytest.mark.parametrize(
    ("visible", "order"),
    [
        ("uuid 3,uuid 0", "PCI_BUS_ID"),
        ("1,7,0", "FASTEST_FIRST"),
    ],
)
def test_values_are_on_the_right_device_whatever_its_cuda_index(
    make_node: MakeNode, start_exporter: StartExporter, start_torch: StartTorch, visible: str, order: str
) -> None:
    node = make_node(devices=4)
    for number in range(4):
        visible = visible.replace(f"uuid {number}", node.uuid(number))
    exporter = start_exporter(node, *QUICK)
    process = start_torch(node, GPUMEM_EXPORTER_URL=exporter.url, CUDA_VISIBLE_DEVICES=visible, CUDA_DEVICE_ORDER=order)
    process.call("start_client", workload="matrix")
    named = [node.uuid(int(word)) if len(word) == 1 and int(word) < 4 else word for word in visible.split(",")]
    visible_uuids = named[: named.index("7")] if "7" in named else named  # CUDA stops at an invalid entry
    assert process.call("uuids") == visible_uuids
    for device in range(len(visible_uuids)):
        process.call("alloc", nbytes=(device + 1) * 7 * MIB, device=device)

    def shown() -> list[dict[tuple[str, str], float]]:
        """Return the allocated and the used bytes of the process, by NVML's index and by uuid."""
        metrics, pid = scrape(exporter), str(process.pid)
        found = []
        for name in ("gpumem_torch_allocated_bytes", "gpumem_process_memory_used_bytes"):
            series = [(dict(labels), size) for labels, size in metrics.samples.get(name, {}).items() if size]
            found.append({(labels["gpu"], labels["uuid"]): size for labels, size in series if labels["pid"] == pid})
        return found

    places = {node.uuid(number): (str(number), node.uuid(number)) for number in range(4)}
    sizes = {places[uuid]: (device + 1) * 7 * MIB for device, uuid in enumerate(visible_uuids)}
    books = {places[book.uuid]: book.processes[process.pid] for book in node.books().devices if book.processes}
    wait_until_equal(shown, [sizes, books], "the bytes of each device")
