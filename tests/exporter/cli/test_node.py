from __future__ import annotations

from typing import Any

import pytest

from gpumem_exporter.actions.action_options import Target
from gpumem_exporter.cli.node_view import require_known, selected
from gpumem_exporter.errors import TargetNotFoundError
from tests.support.builders.live_documents import device, finding, job, live, process, unreported

_LLM = job("llm", process(1, "0", "2", workload="llm", rank="0"), process(2, "1:0", workload="llm", rank="1", uid=1000))
_NOTE = job("demo-notebook", process("3@4026532007", "1:1", workload="demo-notebook", user="bob", uid=None))
_SERVER = job("tritonserver", unreported(4, "0", 6, uid=None), uid=None)
_NODE = live(
    [device("0", _LLM, _SERVER), device("1:0", _LLM), device("1:1", _NOTE), device("2", _LLM)],
    [_LLM, _NOTE, _SERVER],
    [
        finding("growth", "warning", "Growing", "llm grows.", job=_LLM["id"]),
        finding("device_lost", "critical", "Lost device", "GPU 2 is lost.", gpu="2", uuid="GPU-2"),
        finding("check", "warning", "Exporter", "storage: full."),
    ],
)


@pytest.mark.parametrize(
    ("target", "shown"),
    [
        ({}, ["0 1:0 1:1 2", "llm: 1 0 2, 2 1:0", "demo-notebook: 3@4026532007 1:1", "tritonserver: 4 0"]),
        ({"gpu": ["1"]}, ["1:0 1:1", "llm: 2 1:0", "demo-notebook: 3@4026532007 1:1"]),
        ({"uuid": ["GPU-2"]}, ["2", "llm: 1 2"]),
        ({"workload": ["llm"], "rank": ["0"]}, ["0 2", "llm: 1 0 2"]),
        ({"pid": ["3@4026532007", "4"]}, ["0 1:1", "demo-notebook: 3@4026532007 1:1", "tritonserver: 4 0"]),
        ({"user": ["1000", "bob"]}, ["1:0 1:1", "llm: 2 1:0", "demo-notebook: 3@4026532007 1:1"]),
        ({"gpu": ["2"], "workload": ["demo-notebook"]}, [""]),
    ],
)
def test_a_target_selects_processes_their_jobs_and_the_devices_that_they_use(
    target: dict[str, Any], shown: list[str]
) -> None:
    node = selected(_NODE, Target(**target))
    jobs = [
        f"{one['name']}: "
        + ", ".join(" ".join([str(p["pid"]), *(d["gpu"] for d in p["devices"])]) for p in one["processes"])
        for one in node["jobs"]
    ]
    assert [" ".join(one["gpu"] for one in node["devices"]), *jobs] == shown


def test_without_details_the_uid_of_a_process_is_that_of_its_job() -> None:
    one = process(1, "0")
    del one["uid"]
    node = live([device("0")], [job("llm", process(2, "0")) | {"processes": [one], "uid": 1001}])
    assert selected(node, Target(user="1001"))["jobs"]
    assert not selected(node, Target(user="1002"))["jobs"]


@pytest.mark.parametrize(
    ("target", "kinds"),
    [
        ({"workload": ["llm"]}, {"growth", "device_lost", "check"}),
        ({"gpu": ["1"]}, {"growth", "check"}),
        ({"workload": ["demo-notebook"]}, {"check"}),
    ],
)
def test_findings_about_other_jobs_and_devices_are_left_out(target: dict[str, Any], kinds: set[str]) -> None:
    assert {one["kind"] for one in selected(_NODE, Target(**target))["findings"]} == kinds


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"gpu": ["99", "0"]}, "no such GPU '99'; known GPUs: 0, 1, 1:0, 1:1, 2"),
        ({"workload": "demo-notebok"}, "no such workload 'demo-notebok'; did you mean demo-notebook?"),
        ({"pid": "9", "rank": "7"}, "no such pid '9'; known pids: 1, 2, 3@4026532007, 4; no such rank '7'"),
    ],
)
def test_an_unknown_name_is_an_error_with_the_nearest_known_one(target: dict[str, Any], message: str) -> None:
    require_known(_NODE, Target(gpu="1", workload="llm", user="alice"))  # GPU 1 has MIG devices
    with pytest.raises(TargetNotFoundError) as error:
        require_known(_NODE, Target(**target))
    assert message in str(error.value)
