"""Names and descriptions of processes on the metrics page."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families as parse_text

from gpumem_exporter.core.samples import (
    ProcessFacts,
    Snapshot,
)
from tests.support.exposition_builders import (
    SAMPLE,
    device,
    lines,
    node,
    page,
    process,
    silent,
    snapshot,
)


def info(known: Snapshot) -> dict[str, dict[str, str]]:
    """Return the labels of each pid's info series."""
    return {
        sample.labels["pid"]: dict(sample.labels)
        for family in parse_text("\n".join(page(known)))
        for sample in family.samples
        if sample.name == "gpumem_process_info"
    }


def test_a_process_is_described_by_the_host_or_otherwise_by_its_report() -> None:
    known = snapshot(
        process(7, SAMPLE, host_pid=70),
        process(8, SAMPLE, host_pid=80),
        process(9, SAMPLE, host_pid=None),
        on=node(
            device(processes={70: 1, 75: 1}),
            facts={
                70: ProcessFacts(70, 3, "python host.py", "alice", k8s_pod="pod-a"),
                75: ProcessFacts(75, 3, "nvidia-smi", "root"),
            },
        ),
        quiet=(silent(6, host_pid=60, workload="quiet"),),
    )

    shown = info(known)

    assert list(shown) == ["9", "60", "70", "75", "80"]
    assert {pid: labels["command"] for pid, labels in shown.items()} == {
        "9": "python own.py",
        "60": "",
        "70": "python host.py",
        "75": "nvidia-smi",
        "80": "python own.py",
    }
    assert shown["70"]["user"] == "alice"
    assert shown["70"]["k8s_pod"] == "pod-a"
    assert shown["70"]["torch_version"] == "2.15"
    assert [pid for pid, labels in shown.items() if labels["reporting"] == "true"] == ["9", "70", "80"]
    assert shown["60"]["workload"] == "quiet"
    assert shown["75"]["workload"] == ""


def test_host_facts_of_another_process_with_the_same_pid_are_not_shown() -> None:
    earlier = {70: ProcessFacts(70, 2, "another program", "mallory")}
    known = snapshot(process(7, SAMPLE, host_pid=70), on=node(device(processes={70: 999}), facts=earlier))

    assert info(known)["70"]["command"] == "python own.py"
    assert info(known)["70"]["user"] == ""
    assert lines(known, "gpumem_torch_allocated_bytes")
    assert lines(known, "gpumem_torch_non_torch_bytes") == [], "the driver's value is of the earlier process"


def test_a_reporter_whose_pid_was_reused_is_not_shown() -> None:
    later = {70: ProcessFacts(70, 10_000_000, "another program", "mallory")}
    known = snapshot(process(7, SAMPLE, host_pid=70), on=node(device(processes={70: 999}), facts=later))

    assert info(known)["70"]["command"] == "another program"
    assert (info(known)["70"]["workload"], info(known)["70"]["reporting"]) == ("", "false")
    assert lines(known, "gpumem_torch_") == []
    assert any("other_processes" in line and line.endswith(" 999") for line in lines(known, "gpumem_ledger_bytes"))


def test_processes_with_one_pid_in_two_namespaces_have_different_names() -> None:
    known = snapshot(
        process(1, SAMPLE, host_pid=None, namespace=11),
        process(1, SAMPLE, host_pid=None, namespace=12),
        process(2, SAMPLE, host_pid=None, namespace=12),
    )

    assert [line.split('"')[5] for line in lines(known, "gpumem_torch_ooms_total")] == ["1@11", "1@12", "2"]


def test_a_reporters_own_pid_is_never_shown_as_the_drivers_pid() -> None:
    reporter = process(70, SAMPLE, host_pid=None, namespace=11)

    known = snapshot(reporter, on=node(device(processes={70: 500})))

    assert [line.split('"')[5] for line in lines(known, "gpumem_torch_ooms_total")] == ["70@11"]
    assert info(known)["70"]["reporting"] == "false"
    assert info(known)["70@11"]["reporting"] == "true"


def test_the_last_of_two_reporters_with_one_host_pid_is_shown() -> None:
    known = snapshot(
        process(1, SAMPLE, host_pid=70, namespace=11, received=6.0, workload="new"),
        process(1, SAMPLE, host_pid=70, namespace=12, received=5.0, workload="old"),
        quiet=(silent(1, host_pid=70, namespace=13, workload="older"),),
    )

    assert [line.split('"')[7] for line in lines(known, "gpumem_torch_ooms_total")] == ["new"]
    assert [line.split('"')[3] for line in lines(known, "gpumem_reporter_up")] == ["new"]
