from __future__ import annotations

import json
from dataclasses import replace

from gpumem_client.profile.profile_types import Frame, Owner, ProfiledDevice
from gpumem_exporter.features.profiles.profile_diff import difference
from gpumem_exporter.features.profiles.profile_formats import json_document, read_saved
from gpumem_exporter.features.profiles.profile_lines import ShownProfile
from tests.support.builders.builders import MIB, UUIDS
from tests.support.builders.profile_documents import LINEAR, MAIN, SCRIPT, Block, made_up, stored

WEIGHT = Owner("parameters", "model.weight", "4x4", "float32")


def at(line: int, function: str = "grow") -> tuple[Frame, ...]:
    return (LINEAR, Frame(function, SCRIPT, line), MAIN)


def changes(change: ShownProfile) -> dict[str, int]:
    """The changes by owner and line of code, without what stayed equal."""
    found = {}
    for line in change.lines:
        frame = line.stack and line.stack.user
        name = f"{line.owner.name if line.owner else ''}:{frame.line if frame else ''}"
        if line.change_bytes:
            found[name] = line.change_bytes
    return found


def of(*blocks: Block, start: int = 1000, recorded: bool = True) -> ShownProfile:
    return stored(made_up(blocks, recorded=recorded), start_time_ticks=start).at("live")


def test_one_process_is_compared_line_by_line_and_another_one_may_have_other_line_numbers() -> None:
    before = of((0, at(10), None, 8 * MIB, 8 * MIB), (0, at(11), None, 5 * MIB, 5 * MIB))
    after = (0, at(10), None, 9 * MIB, 9 * MIB), (0, at(14), None, 7 * MIB, 7 * MIB)
    assert changes(difference(before, of(*after))) == {":10": MIB, ":11": -5 * MIB, ":14": 7 * MIB}
    assert changes(difference(before, of(*after, start=2000))) == {":10": MIB, ":14": 2 * MIB}


def test_a_tensor_of_a_module_is_the_same_with_and_without_its_stack() -> None:
    before = of((0, at(10), WEIGHT, 8 * MIB, 8 * MIB), (0, at(11), None, MIB, MIB))
    after = of((0, (), WEIGHT, 8 * MIB, 8 * MIB), (0, at(11), None, MIB, MIB))
    assert changes(difference(before, after)) == {}


def test_the_length_of_a_list_is_not_part_of_its_name() -> None:
    before = of((0, at(10), Owner("tensors", "list of 3 in outputs"), 3 * MIB, 3 * MIB))
    after = of((0, at(10), Owner("tensors", "list of 900 in outputs"), 900 * MIB, 900 * MIB))
    assert changes(difference(before, after)) == {"list of 900 in outputs:10": 897 * MIB}


def test_without_stacks_in_one_profile_owners_are_compared() -> None:
    outputs = Owner("tensors", "list of 3 in outputs")
    before = of((0, (), outputs, 3 * MIB, None), recorded=False)
    after = of((0, at(10), outputs, 2 * MIB, 2 * MIB), (0, at(11), outputs, 4 * MIB, 4 * MIB))
    change = difference(before, after)
    assert changes(change) == {"list of 3 in outputs:": 3 * MIB}
    assert len(change.notes) == 1


def test_the_sums_are_those_of_the_profiles_on_every_device() -> None:
    before = of((0, at(1), None, 1, 1), (1, at(2), None, 2, 2), (1, (), Owner("unseen"), 4, 4))
    after = of((0, at(1), None, 8, 8), (0, at(3), WEIGHT, 16, 16), (1, at(2), None, 32, 32), start=2000)
    change = difference(before, after)
    assert tuple(device["uuid"] for device in change.devices) == UUIDS[:2]
    for index in (0, 1):
        lines = [line for line in change.lines if line.device == index]
        assert sum(line.before_bytes for line in lines) == before.devices[index]["allocated_bytes"]
        assert sum(line.bytes for line in lines) == after.devices[index]["allocated_bytes"]


def test_a_job_that_moved_to_another_device_is_compared_by_the_order_of_devices() -> None:
    before = of((0, (), WEIGHT, MIB, MIB), (1, (), WEIGHT, 2 * MIB, 2 * MIB))
    moved = replace(made_up([(0, (), WEIGHT, MIB, MIB)]), devices=(ProfiledDevice("GPU-other", MIB),))
    change = difference(before, stored(moved, start_time_ticks=2000).at("live"))
    assert [device["uuid"] for device in change.devices] == ["GPU-other", UUIDS[1]]
    assert [line.change_bytes for line in change.lines if line.change_bytes] == [-2 * MIB]


def test_a_saved_profile_has_the_frames_of_the_profile() -> None:
    frames = Frame("f", "", 7), Frame("g", "", 0), Frame("h (i)", "/src/train.py", 3), Frame("k", "7", 0)
    profile = of((0, frames, None, 8 * MIB, 8 * MIB))
    saved = read_saved(json.loads(json_document(profile, 1 << 20)))
    assert [line.stack and line.stack.frames for line in saved.lines] == [frames]
    assert changes(difference(saved, profile)) == {}
