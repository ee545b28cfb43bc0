from __future__ import annotations

import re

import pytest

from gpumem_exporter.cli.fleet.choosing import Member, choose
from gpumem_exporter.cli.fleet.naming import Named, Place, named_processes, place_order, places
from gpumem_exporter.errors import ConfigurationError
from tests.support.fleet_builders import A, process, unreported

DEFAULT = "http://{instance}"


def test_the_instance_is_the_exporter_and_the_labels_are_its_processes() -> None:
    series = [
        {"__name__": "x", "instance": "n2:9844", "job": "gpumem", "pid": "7", "workload": "w", "gpu": "0"},
        {"instance": "n1:9844", "uuid": "GPU-1"},
        {"instance": "n2:9844", "pid": "1@4026532007", "rank": "3"},
    ]
    assert named_processes(series, DEFAULT) == {
        Place("n1:9844", "http://n1:9844"): [Named(uuid="GPU-1")],
        Place("n2:9844", "http://n2:9844"): [
            Named(pid="7", workload="w", gpu="0"),
            Named(pid="1@4026532007", rank="3"),
        ],
    }


def test_a_series_that_two_prometheis_have_is_named_once() -> None:
    series = [{"instance": "n1:1", "replica": replica, "pid": "7"} for replica in "ab"]
    assert named_processes(series, DEFAULT) == {Place("n1:1", "http://n1:1"): [Named(pid="7")]}


def test_a_series_that_names_no_process_is_told_what_it_needs() -> None:
    with pytest.raises(ConfigurationError, match=r'--query: .*\{instance="n1:1"\}.*\bpid, workload, rank, gpu'):
        named_processes([{"instance": "n1:1"}], DEFAULT)


def test_a_series_without_instance_is_told_what_it_needs() -> None:
    with pytest.raises(ConfigurationError, match=r"--query: .*'instance'.*--instance-url"):
        named_processes([{"pid": "1"}], DEFAULT)


@pytest.mark.parametrize(
    ("template", "url"),
    [
        ("http://{instance}", "http://n1:9400"),
        ("http://{node}:9844", "http://gpu-7.example:9844"),
        ("unix:///run/{node}/exporter.sock", "unix:///run/gpu-7.example/exporter.sock"),
    ],
)
def test_another_label_may_say_where_the_exporter_is(template: str, url: str) -> None:
    (place,) = places([{"instance": "n1:9400", "node": "gpu-7.example"}], template)
    assert place == Place("n1:9400", url)


def test_an_exporter_without_a_name_of_its_own_is_not_called_by_its_password() -> None:
    (place,) = places([{"node": "n1"}], "https://ada:secret@{node}:9844")
    assert place == Place("n1:9844", "https://ada:secret@n1:9844")


@pytest.mark.parametrize("value", ["evil.example/x?", "user@evil.example", "a b", "n1#", "..%2f"])
def test_a_label_that_would_lead_elsewhere_is_no_address(value: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(repr(value))):
        places([{"instance": value}], DEFAULT)


def test_exporters_stand_in_the_order_of_their_numbers() -> None:
    found = places([{"instance": f"node{i}:9844"} for i in (10, 9, 1)], DEFAULT)
    assert [place.instance for place in found] == ["node1:9844", "node9:9844", "node10:9844"]
    assert place_order(Place("", "")) == [(-1, "")]


PROCESSES = [
    process(1, gpus=("0", "1")),
    process(2, rank="1", gpus=("1",)),
    process("1@77", workload="other", rank=""),
    unreported(9, gpus=("1",)),
]


def chosen(*named: Named, unreported: bool = False) -> list[tuple[int | str, tuple[str, ...] | None]]:
    return [(one.pid, one.uuids) for one in choose(A, named, PROCESSES, unreported=unreported).members]


def test_labels_narrow_each_other_down_to_processes_and_their_devices() -> None:
    assert chosen(Named(pid="1")) == [(1, None)]
    assert chosen(Named(pid="1@77")) == [("1@77", None)]
    assert chosen(Named(workload="train")) == [(1, None), (2, None)]
    assert chosen(Named(workload="train", rank="1")) == [(2, None)]
    assert chosen(Named(gpu="1")) == [(1, ("GPU-1",)), (2, ("GPU-1",))]
    assert chosen(Named(pid="1", uuid="GPU-0", gpu="0")) == [(1, ("GPU-0",))]


def test_a_process_that_several_series_name_is_one_with_the_devices_of_all() -> None:
    both = (Named(pid="1", gpu="0"), Named(pid="1", gpu="1"), Named(pid="1", gpu="0"))
    assert chosen(*both) == [(1, ("GPU-0", "GPU-1"))]
    assert chosen(*both, Named(pid="1")) == [(1, None)]


def test_a_pid_that_is_of_another_workload_by_now_is_gone() -> None:
    choice = choose(A, [Named(pid="1", workload="before"), Named(pid="5")], PROCESSES, unreported=False)
    assert choice.members == ()
    assert [(one.named.pid, one.outcome) for one in choice.missing] == [("1", "gone"), ("5", "gone")]


def test_what_does_not_report_can_be_ended_and_nothing_else() -> None:
    choice = choose(A, [Named(pid="9")], PROCESSES, unreported=False)
    assert choice.members == ()
    assert [one.outcome for one in choice.missing] == ["unsupported"]
    assert choice.missing[0].reason
    assert chosen(Named(pid="9"), unreported=True) == [(9, None)]
    assert chosen(Named(gpu="1"), unreported=True) == [(1, ("GPU-1",)), (2, ("GPU-1",)), (9, ("GPU-1",))]
    assert Member(A, 9, None, None).target == {"pid": 9}
    assert Member(A, 1, "", "0").target == {"pid": 1, "workload": "", "rank": "0"}
