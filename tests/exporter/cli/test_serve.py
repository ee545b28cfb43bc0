from __future__ import annotations

import signal
import socket
import sys
from types import ModuleType

import pytest

from gpumem_exporter.main import main
from gpumem_exporter.serve_command import settings_model
from gpumem_exporter.settings import Settings


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, object], bool]]:
    """Replace the server, and record what it would serve."""
    calls: list[tuple[dict[str, object], bool]] = []
    stand_in = ModuleType("gpumem_exporter.serving")

    def run(settings: Settings, *, demo: bool = False, demo_processes: int | None = None) -> int:
        assert demo_processes in (None, 256)
        calls.append((settings.model_dump(), demo))
        return 0

    stand_in.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    for name in settings_model().model_fields:
        monkeypatch.delenv(f"GPUMEM_{name.upper()}", raising=False)
    monkeypatch.delenv("GPUMEM_CONFIG_FILE", raising=False)
    return calls


def test_every_flag_reaches_its_setting_also_an_empty_one(
    served: list[tuple[dict[str, object], bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUMEM_WEB_LISTEN_SOCKET", "/of/environment")
    flags = {
        "--web.listen-socket": "",
        "--collect.interval": "2",
        "--action.allow": "empty_cache",
        "--log.format": "json",
    }
    addresses = ["--web.listen-address", "127.0.0.1:1", "--web.listen-address", "[::1]:2"]
    arguments = [*addresses, *(word for flag in flags.items() for word in flag)]
    collectors = ["--no-collector.torch", "--collector.devices"]
    assert main(["serve", "--demo", "--web.hide-identities", "--report.max-processes=9", *collectors, *arguments]) == 0
    expected = {
        "web_listen_address": ("127.0.0.1:1", "[::1]:2"),
        "web_listen_socket": "",
        "web_hide_identities": True,
        "collect_interval": 2.0,
        "report_max_processes": 9,
        "action_allow": ("empty_cache",),
        "log_format": "json",
        "collector_torch": False,
    }
    assert served == [(settings_model().model_validate(expected).model_dump(), True)]


def test_the_number_of_simulated_processes_needs_a_demo(served: list[tuple[dict[str, object], bool]]) -> None:
    assert main(["serve", "--demo", "--demo.processes", "256"]) == 0
    assert main(["serve", "--demo.processes", "256"]) == 2
    assert main(["serve", "--demo", "--demo.processes", "0"]) == 2
    assert served == [(settings_model()().model_dump(), True)]


def test_a_start_that_fails_leaves_sighup_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUMEM_CONFIG_FILE", raising=False)
    monkeypatch.setattr("gpumem_exporter.serving.configure_logging", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "--web.listen-address", f"127.0.0.1:{taken.getsockname()[1]}"]) == 1
    assert signal.SIGHUP not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
