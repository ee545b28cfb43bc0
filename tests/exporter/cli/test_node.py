from __future__ import annotations

from typing import Any

import pytest

from gpumem_exporter.actions.request import Target
from gpumem_exporter.cli.node import Node, concerns
from gpumem_exporter.errors import TargetNotFoundError
from tests.support.top_documents import GIB, device, event, process, unreported

_DEVICES = {"devices": [device("0"), device("1:0"), device("1:1"), device("2")]}
_PROCESSES = {
    "processes": [
        process(1, "0", "2", workload="llm", rank="0", uid=1000),
        process(2, "1:0", workload="llm", rank="1", user=None, uid=None),
        process("3@4026532007", "1:1", workload="demo-notebook", rank="", user="bob"),
        unreported(4, "0", GIB),
    ]
}
_NODE = Node(_DEVICES, _PROCESSES)


@pytest.mark.parametrize(
    ("target", "shown"),
    [
        ({}, ["0 1:0 1:1 2", "1: 0 2", "2: 1:0", "3@4026532007: 1:1", "4: 0"]),
        ({"gpu": ["0"]}, ["0", "1: 0", "4: 0"]),
        ({"gpu": ["1"]}, ["1:0 1:1", "2: 1:0", "3@4026532007: 1:1"]),
        ({"gpu": ["1:1", "2"]}, ["1:1 2", "1: 2", "3@4026532007: 1:1"]),
        ({"uuid": ["GPU-2"]}, ["2", "1: 2"]),
        ({"workload": ["llm"], "rank": ["0"]}, ["0 2", "1: 0 2"]),
        ({"workload": [""]}, ["0", "4: 0"]),
        ({"pid": ["3@4026532007", "4"]}, ["0 1:1", "3@4026532007: 1:1", "4: 0"]),
        ({"user": ["1000", "bob"]}, ["0 1:1 2", "1: 0 2", "3@4026532007: 1:1"]),
        ({"gpu": ["2"], "workload": ["demo-notebook"]}, [""]),
    ],
)
def test_a_target_selects_processes_and_the_devices_that_they_use(target: dict[str, Any], shown: list[str]) -> None:
    node = _NODE.selected(Target(**target))
    assert [
        " ".join(one["gpu"] for one in node.devices["devices"]),
        *(f"{p['pid']}: {' '.join(d['gpu'] for d in p['devices'])}" for p in node.processes["processes"]),
    ] == shown


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"gpu": ["99", "0"]}, "no such GPU '99'; known GPUs: 0, 1, 1:0, 1:1, 2"),
        ({"workload": "demo-notebok"}, "no such workload 'demo-notebok'; did you mean demo-notebook?"),
        ({"user": "bib"}, "did you mean bob?"),
        ({"pid": "9", "rank": "7"}, "no such pid '9'; known pids: 1, 2, 3@4026532007, 4; no such rank '7'"),
    ],
)
def test_an_unknown_name_is_an_error_with_the_nearest_known_one(target: dict[str, Any], message: str) -> None:
    with pytest.raises(TargetNotFoundError) as error:
        _NODE.require_known(Target(**target))
    assert message in str(error.value)


def test_a_gpu_stands_for_its_mig_devices_and_names_that_match_together_nothing_are_no_error() -> None:
    _NODE.require_known(Target(gpu="1", workload="llm", user="alice"))


def test_an_event_is_left_out_if_one_of_its_values_is_not_selected() -> None:
    events = [
        event(1, "x", 0.0),
        event(2, "x", 0.0, gpu="1:0"),
        event(3, "x", 0.0, gpu=None, uuid=None, pid=None, workload=None),
        event(4, "x", 0.0, workload="eval", pid=8),
    ]

    def ids(**target: Any) -> list[int]:
        return [one["id"] for one in events if concerns(Target(**target), one)]

    assert ids() == [1, 2, 3, 4]
    assert ids(gpu="1") == [2, 3]
    assert ids(workload="llm") == [1, 2, 3]
    assert ids(pid="8") == [3, 4]
