"""`doctor --url` from another machine than the exporter's: what it finds is the exporter's, not this machine's."""

from __future__ import annotations

import pytest

from gpumem_exporter.cli.commands import doctor
from gpumem_exporter.cli.commands.doctor import diagnose
from gpumem_exporter.cli.doctor.finding import FAIL, PASS, Finding
from gpumem_exporter.cli.options import ConnectionOptions
from gpumem_exporter.nvml.pynvml_provider import PynvmlProvider
from tests.support.running_exporter import ScriptedProvider, running_exporter
from tests.support.waiting import eventually


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(_: PynvmlProvider) -> None:
        raise AssertionError("opened-here")

    monkeypatch.setattr(doctor, "is_on_this_machine", lambda url: False)
    monkeypatch.setattr(PynvmlProvider, "open", opened)


def _found(url: str) -> dict[str, Finding]:
    return {finding.check: finding for finding in diagnose(ConnectionOptions(url=url))}


@pytest.mark.usefixtures("elsewhere")
def test_a_driver_that_is_down_there_is_told_in_its_own_words_and_none_is_asked_here() -> None:
    provider = ScriptedProvider()
    provider.error = "driver-not-loaded"
    with running_exporter(provider=provider) as exporter:
        eventually(lambda: exporter.document("/health")["nvml"]["error"], lambda error: "driver-not-loaded" in error)
        found = _found(exporter.url)
    assert found["driver"].verdict == FAIL
    assert "driver-not-loaded" in found["driver"].detail
    assert "opened-here" not in found["driver"].detail
    assert "devices" not in found
    assert found["pid namespace"].verdict != PASS, "this process' namespace does not count"


@pytest.mark.usefixtures("elsewhere")
def test_an_exporter_that_does_not_answer_there_says_nothing_of_this_machines_driver() -> None:
    found = _found("http://127.0.0.1:1")
    assert found.keys() == {"exporter"}
    assert found["exporter"].verdict == FAIL
