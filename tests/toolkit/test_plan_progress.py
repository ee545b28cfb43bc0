from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest

from gpumem_toolkit.planning import planner_process as progress_module
from gpumem_toolkit.planning.planner_process import Progress
from tests.support.waiting import wait_for


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "shown"), [(Terminal(), True), (io.StringIO(), False)])
def test_the_progress_is_one_line_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, shown: bool
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress() as progress:
        run = progress.of("checkpointing")
        run(4)
        run(315)
    text = stream.getvalue()
    assert ("run 2: checkpointing, batch 315" in text) is shown
    assert "\n" not in text
    assert text.endswith("\r\033[K") is shown


def test_a_log_has_a_line_about_a_plan_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, now = io.StringIO(), [0.0]
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with Progress() as progress:
        progress.of("checkpointing")(315)
        now[0] = 45.0
        wait_for(stream.getvalue, "the line")
    assert stream.getvalue() == "planning for 45 s: run 1: checkpointing, batch 315\n"
