"""`doctor --url` of an exporter on another machine: the findings are about that machine."""

from __future__ import annotations

import pytest

from gpumem_exporter.cli.commands import doctor
from gpumem_exporter.cli.commands.doctor import diagnose
from gpumem_exporter.cli.doctor import FAIL
from gpumem_exporter.node.pynvml_provider import PynvmlProvider
from tests.support.running_exporter import ScriptedProvider, running_exporter
from tests.support.waiting import eventually


def test_the_exporters_driver_error_is_shown_and_the_local_driver_is_not_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def opened(_: PynvmlProvider) -> None:
        raise AssertionError("opened-here")

    monkeypatch.setattr(doctor, "is_on_this_machine", lambda url: False)
    monkeypatch.setattr(PynvmlProvider, "open", opened)
    provider = ScriptedProvider()
    provider.error = "driver-not-loaded"
    with running_exporter(provider=provider) as exporter:
        eventually(lambda: exporter.document("/health")["nvml"]["error"], lambda error: "driver-not-loaded" in error)
        found = {finding.check: finding for finding in diagnose(exporter.url)}
    assert found["driver"].verdict == FAIL
    assert "driver-not-loaded" in found["driver"].detail
    assert "opened-here" not in found["driver"].detail
    assert "devices" not in found
