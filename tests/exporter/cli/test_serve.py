from __future__ import annotations

import sys
from types import ModuleType

import pytest

from gpumem_exporter.cli.main import main
from gpumem_exporter.server.settings import Settings, setting_key


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Settings, bool]]:
    """Replace the server, and record what it would serve."""
    calls: list[tuple[Settings, bool]] = []
    stand_in = ModuleType("gpumem_exporter.server.serve")

    def run(settings: Settings, *, demo: bool = False) -> int:
        calls.append((settings, demo))
        return 0

    stand_in.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    for name in Settings.model_fields:
        monkeypatch.delenv(f"GPUMEM_{name.upper()}", raising=False)
    monkeypatch.delenv("GPUMEM_CONFIG_FILE", raising=False)
    return calls


def test_the_help_has_every_setting_with_its_text_and_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["serve", "--help"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    for name, field in Settings.model_fields.items():
        assert f"--{setting_key(name)} " in words
        assert (field.description or "?") in words
    assert "[default: 512]" in words
    assert "[default: :9844]" in words
    assert "--config.file" in words
    assert "--demo" in words


def test_without_flags_the_defaults_apply(served: list[tuple[Settings, bool]]) -> None:
    assert main(["serve"]) == 0
    assert served == [(Settings(), False)]


def test_every_flag_reaches_its_setting(served: list[tuple[Settings, bool]]) -> None:
    flags = {
        "--web.listen-socket": "/s",
        "--web.telemetry-path": "/m",
        "--collect.interval": "2",
        "--report.interval": "0.5",
        "--report.expiry": "7",
        "--report.max-processes": "9",
        "--action.allow": "empty_cache",
        "--log.level": "debug",
        "--log.format": "json",
    }
    addresses = ["--web.listen-address", "127.0.0.1:1", "--web.listen-address", "[::1]:2"]
    arguments = [*addresses, *(word for flag in flags.items() for word in flag)]
    assert main(["serve", "--demo", *arguments]) == 0
    settings = Settings(
        web_listen_address=("127.0.0.1:1", "[::1]:2"),
        web_listen_socket="/s",
        web_telemetry_path="/m",
        collect_interval=2.0,
        report_interval=0.5,
        report_expiry=7.0,
        report_max_processes=9,
        action_allow=("empty_cache",),
        log_level="debug",
        log_format="json",
    )
    assert served == [(settings, True)]


def test_an_empty_flag_overrides_the_environment(
    served: list[tuple[Settings, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUMEM_WEB_LISTEN_SOCKET", "/of/environment")
    monkeypatch.setenv("GPUMEM_ACTION_ALLOW", "empty_cache")
    assert main(["serve", "--web.listen-socket", "", "--action.allow", ""]) == 0
    assert served[0][0].web_listen_socket == ""
    assert served[0][0].action_allow == ()
