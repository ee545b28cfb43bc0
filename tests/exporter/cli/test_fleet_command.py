from __future__ import annotations

import pytest

from gpumem_exporter.cli.main import main
from gpumem_exporter.cli.program import PROGRAM


@pytest.mark.parametrize(
    ("arguments", "wrong", "right"),
    [
        ([], "no command", "fleet --help"),
        (["claer"], "'claer'", "'clear'"),
        (["clear"], "--query", "fleet clear --help"),
        (["clear", "--query", "up"], "Prometheus", "--prometheus URL"),
        (["clear", "--query", "up", "--parallel", "0"], "--parallel", "fleet clear --help"),
        (["clear", "--query", "up", "--max-processes", "0"], "--max-processes", "fleet clear --help"),
        (["clear", "--query", "up", "--group", "--mode", "now"], "--mode now", "step"),
        (["clear", "--query", "up", "--deadline", "nan"], "--deadline nan", "over 0"),
        (["fraction", "1.5", "--query", "up"], "F 1.5", "at most 1"),
        (["terminate", "--query", "up", "--group"], "--group", "fleet terminate --help"),
        (["top", "--interval", "nan"], "--interval nan", "0.2 to 3600"),
        (["top", "--prometheus", "http://p"], "terminal", "fleet info"),
        (["info", "--prometheus", "node:9090"], "--prometheus", "http://host:port"),
    ],
)
def test_wrong_usage_exits_with_2_and_one_line(
    arguments: list[str], wrong: str, right: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GPUMEM_PROMETHEUS_URL", raising=False)
    assert main(["fleet", *arguments]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert captured.err.startswith(f"{PROGRAM} fleet: ")
    assert wrong in captured.err
    assert right in captured.err
