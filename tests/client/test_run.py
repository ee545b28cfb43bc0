from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpumem_client.run import injected_environment, run
from gpumem_client.wire.errors import ConfigurationError

_BOOTSTRAP = "/opt/x/client/gpumem_client/bootstrap"


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, list[str], dict[str, str]]]]:
    """Record the commands that would replace this process."""
    calls: list[tuple[str, list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execvpe", lambda *call: calls.append(call))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGPIPE, signal.SIGXFSZ)}
    yield calls
    for number, handler in handlers.items():  # `run` restores their defaults for the command
        signal.signal(number, handler)


def test_the_bootstrap_is_once_in_the_path_and_first() -> None:
    path = injected_environment({"PYTHONPATH": f"/a:{_BOOTSTRAP}:/b"}, _BOOTSTRAP)["PYTHONPATH"]
    assert path == f"{_BOOTSTRAP}:/a:/b"


def test_options_become_variables_and_the_command_keeps_its_arguments(
    executed: list[tuple[str, list[str], dict[str, str]]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GPUMEM_WORKLOAD", "of the environment")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.json").write_text('{"reserved_peak_bytes": 5}')
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    given = ["--workload=llm", "--url", "unix:///s.sock", "--rank", "3", "--plan", "plan.json"]
    run([*given, "--allocator", "expandable_segments:True", "--", "python", "train.py", "--url", "x", "--"])
    ((program, command, environment),) = executed
    assert program == "python"
    assert command == ["python", "train.py", "--url", "x", "--"]
    assert environment["GPUMEM_WORKLOAD"] == "llm"
    assert environment["GPUMEM_EXPORTER_URL"] == "unix:///s.sock"
    assert environment["GPUMEM_RANK"] == "3"
    assert environment["GPUMEM_PLAN"] == str(tmp_path / "plan.json")
    assert environment["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64,expandable_segments:True"


def test_the_dashes_before_the_command_are_optional(executed: list[tuple[str, list[str], dict[str, str]]]) -> None:
    run(["--workload", "llm", "torchrun", "--nproc-per-node", "8"])
    assert executed[0][1] == ["torchrun", "--nproc-per-node", "8"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "command"),
        (["--workload", "x"], "command"),
        (["--wrkload", "x", "--", "true"], "--wrkload"),
        (["--rank"], "--rank"),
        (["--url", "ftp://x", "--", "true"], "ftp://x"),
        (["--allocator", "expandable:True", "--", "true"], "expandable_segments"),
        (["--plan", "/nowhere/plan.json", "--", "true"], "/nowhere/plan.json"),
    ],
)
def test_wrong_usage_is_one_line_and_starts_nothing(
    arguments: list[str], named: str, executed: list[tuple[str, list[str], dict[str, str]]]
) -> None:
    with pytest.raises(ConfigurationError, match=named) as caught:
        run(arguments)
    assert "\n" not in str(caught.value)
    assert executed == []
