from __future__ import annotations

import re
from unittest.mock import Mock

import pytest

from gpumem_client.wire.errors import ConfigurationError
from gpumem_exporter.features.fleet import fleet_nodes
from gpumem_exporter.features.fleet.fleet_nodes import Exporter, Fleet, Selector, selected_by

DEFAULT = "http://{instance}"


def test_instance_selects_the_exporter_and_other_labels_its_processes() -> None:
    series = [
        {"__name__": "x", "instance": "n2:9844", "job": "gpumem", "pid": "7", "workload": "w", "gpu": "0"},
        {"instance": "n1:9844", "uuid": "GPU-1"},
        {"instance": "n2:9844", "pid": "1@4026532007", "rank": "3", "replica": "a"},
        {"instance": "n2:9844", "pid": "1@4026532007", "rank": "3", "replica": "b"},
    ]
    assert selected_by(series, DEFAULT) == {
        Exporter("http://n1:9844", "n1:9844"): [Selector(uuid="GPU-1")],
        Exporter("http://n2:9844", "n2:9844"): [
            Selector(pid=7, workload="w", gpu="0"),
            Selector(pid="1@4026532007", rank="3"),
        ],
    }


@pytest.mark.parametrize(
    ("template", "url"),
    [
        ("http://{instance}", "http://n1:9400"),
        ("http://{node}:9844", "http://gpu-7.example:9844"),
        ("unix:///run/{node}/exporter.sock", "unix:///run/gpu-7.example/exporter.sock"),
    ],
)
def test_any_label_can_give_the_exporters_address(template: str, url: str) -> None:
    (exporter,) = selected_by([{"instance": "n1:9400", "node": "gpu-7.example"}], template)
    assert (exporter.url, exporter.instance) == (url, "n1:9400")


def test_exporters_are_in_natural_order_and_their_names_have_no_password() -> None:
    found = list(selected_by([{"node": f"node{i}"} for i in (10, 9, 1)], "https://ada:secret@{node}:9844"))
    assert [exporter.instance for exporter in found] == ["node1:9844", "node9:9844", "node10:9844"]
    assert found[0].url == "https://ada:secret@node1:9844"


@pytest.mark.parametrize("value", ["", "evil.example/x?", "user@evil.example", "a b", "n1#", "..%2f"])
def test_a_label_cannot_be_missing_or_lead_to_another_host(value: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(repr(value))):
        selected_by([{"instance": value}], DEFAULT)


@pytest.mark.parametrize(
    ("environment", "option", "insecure"), [("", False, False), ("1", False, True), ("", True, True)]
)
def test_a_token_needs_https_unless_insecure(
    environment: str, option: bool, insecure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Mock()
    monkeypatch.setenv("GPUMEM_EXPORTER_INSECURE", environment)
    monkeypatch.setattr(fleet_nodes, "ExporterApi", opened)
    names = ("as_json", "token_file", "instance_url", "prometheus_token_file")
    Fleet({**dict.fromkeys(names), "insecure": option, "prometheus": "http://p", "prometheus_headers": ()}).api("u")
    assert opened.call_args.kwargs["trust"].insecure == bool(environment or option)
