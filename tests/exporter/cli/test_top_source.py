from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from gpumem_client.wire.errors import ExporterUnreachableError
from gpumem_exporter.cli.api_client import ExporterApi
from gpumem_exporter.cli.node_view import read_live
from gpumem_exporter.cli.render.node_tables import View, heading, node_tables
from gpumem_exporter.cli.top.driver import DriverReader
from gpumem_exporter.errors import NvmlUnavailableError
from gpumem_exporter.features.fleet.fleet_command import FleetSource
from gpumem_exporter.features.fleet.fleet_nodes import Fleet
from gpumem_exporter.features.fleet.prometheus import Prometheus
from gpumem_exporter.main import main
from gpumem_exporter.node.pynvml_provider import PynvmlProvider
from tests.support.builders.live_documents import full_node
from tests.support.truth.golden import printed


def test_another_server_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ExporterApi, "get", lambda *_: {"jobs": []})
    with pytest.raises(ExporterUnreachableError, match="is not a gpumem-exporter"):
        read_live(ExporterApi(("unix:///e.sock",)))


def test_a_name_that_the_node_does_not_have_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ExporterApi, "get", lambda *_: full_node())
    assert main(["top", "--once", "--url", "unix:///e.sock", "--workload", "lm-pretrain"]) == 1
    assert "no such workload 'lm-pretrain'; did you mean llm-pretrain?" in capsys.readouterr().err


def test_the_error_of_a_driver_that_cannot_replace_the_exporter_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_: PynvmlProvider) -> None:
        raise NvmlUnavailableError("no library")

    monkeypatch.setattr(PynvmlProvider, "open", absent)
    with pytest.raises(ExporterUnreachableError, match=r"no-answer.*no library"):
        DriverReader("no-answer").read()


class _Fleet:
    """Prometheus and the exporters of three nodes; `answers` has what an exporter returns or raises, by its URL."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.instances = ["node1", "node2"]
        self.answers: dict[str, Any] = {f"http://node{i}": full_node() for i in (1, 2, 3)}

    def query(self, *_: Any) -> tuple[list[dict[str, str]], tuple[str, ...]]:
        if self.error is not None:
            raise self.error
        return [{"instance": name} for name in self.instances], ("a store is down",)

    def get(self, url: str) -> Any:
        if isinstance(self.answers[url], Exception):
            raise self.answers[url]
        return self.answers[url]


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> tuple[_Fleet, Callable[[], FleetSource]]:
    world = _Fleet()
    monkeypatch.setattr(ExporterApi, "get", lambda api, _: world.get(api.url))
    monkeypatch.setattr(Prometheus, "query", world.query)
    monkeypatch.setenv("GPUMEM_PROMETHEUS_URL", "http://prometheus:9090")
    names = ("as_json", "token_file", "insecure", "prometheus_token_file")
    values = {**dict.fromkeys(names), "prometheus": "http://p", "instance_url": "http://{instance}"}
    return world, lambda: FleetSource(Fleet({**values, "prometheus_headers": ()}), "up")


def test_a_node_that_does_not_answer_keeps_its_last_values_and_a_new_one_says_why_it_has_none(
    fleet: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    world, open_source = fleet
    source = open_source()
    first, warnings = source.read()
    assert [(node.name, node.error) for node in first] == [("node1", ""), ("node2", "")]
    assert warnings == ("a store is down",)
    world.instances = ["node2", "node3"]
    world.answers |= {f"http://node{i}": ExporterUnreachableError(f"node{i}-is-down") for i in (2, 3)}
    nodes, _ = source.read()
    assert [(node.name, node.error) for node in nodes] == [("node2", "node2-is-down"), ("node3", "node3-is-down")]
    assert nodes[0].live == first[1].live
    assert nodes[1].live is None
    text = "\n".join(printed(*node_tables(nodes, View(), 120, warnings=warnings), width=120))
    for line in ("node2 .*as of 03:42:04.*node2-is-down", "node3 .*node3-is-down", "a store is down", "node2.*llm"):
        assert re.search(line, text)
    world.answers["http://node2"] = full_node()
    assert main(["fleet", "info", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert [exporter["error"] and exporter["error"][:5] for exporter in document["exporters"]] == [None, "node3"]
    assert [len(exporter["devices"]) for exporter in document["exporters"]] == [8, 0]
    assert document["warnings"] == ["a store is down"]


def test_devices_that_two_exporters_see_count_once_and_simulated_ones_do_not(fleet: Any) -> None:
    world, open_source = fleet
    nodes, _ = open_source().read()
    assert "6 jobs on 8 devices" in heading(nodes).plain
    for url in ("http://node1", "http://node2"):
        world.answers[url] = {**full_node(), "node": {**full_node()["node"], "source": "demo"}}
    nodes, _ = open_source().read()
    assert "12 jobs on 16 devices" in heading(nodes).plain
