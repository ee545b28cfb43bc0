from __future__ import annotations

import re

import pytest

from gpumem_client.wire.errors import ConfigurationError
from gpumem_exporter.features.fleet.node_selection import Exporter, Selector, exporters_of, selectors_of

DEFAULT = "http://{instance}"


def test_instance_selects_the_exporter_and_other_labels_its_processes() -> None:
    series = [
        {"__name__": "x", "instance": "n2:9844", "job": "gpumem", "pid": "7", "workload": "w", "gpu": "0"},
        {"instance": "n1:9844", "uuid": "GPU-1"},
        {"instance": "n2:9844", "pid": "1@4026532007", "rank": "3", "replica": "a"},
        {"instance": "n2:9844", "pid": "1@4026532007", "rank": "3", "replica": "b"},
    ]
    assert selectors_of(series, DEFAULT) == {
        Exporter("n1:9844", "http://n1:9844"): [Selector(uuid="GPU-1")],
        Exporter("n2:9844", "http://n2:9844"): [
            Selector(pid="7", workload="w", gpu="0"),
            Selector(pid="1@4026532007", rank="3"),
        ],
    }


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ({"instance": "n1:1"}, r'--query: .*\{instance="n1:1"\}.*\bpid, workload, rank, gpu'),
        ({"pid": "1"}, r"--query: .*'instance'.*--instance-url"),
    ],
)
def test_the_error_for_a_series_names_the_missing_label(labels: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        selectors_of([labels], DEFAULT)


@pytest.mark.parametrize(
    ("template", "url"),
    [
        ("http://{instance}", "http://n1:9400"),
        ("http://{node}:9844", "http://gpu-7.example:9844"),
        ("unix:///run/{node}/exporter.sock", "unix:///run/gpu-7.example/exporter.sock"),
    ],
)
def test_any_label_can_give_the_exporters_address(template: str, url: str) -> None:
    assert exporters_of([{"instance": "n1:9400", "node": "gpu-7.example"}], template) == [Exporter("n1:9400", url)]


def test_exporters_are_in_natural_order_and_their_names_have_no_password() -> None:
    found = exporters_of([{"node": f"node{i}"} for i in (10, 9, 1)], "https://ada:secret@{node}:9844")
    assert [exporter.instance for exporter in found] == ["node1:9844", "node9:9844", "node10:9844"]
    assert found[0].url == "https://ada:secret@node1:9844"


@pytest.mark.parametrize("value", ["evil.example/x?", "user@evil.example", "a b", "n1#", "..%2f"])
def test_a_label_cannot_lead_to_another_host(value: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(repr(value))):
        exporters_of([{"instance": value}], DEFAULT)
