from __future__ import annotations

import io
import sys

import pytest

from gpumem_exporter.training.planning.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "shown"), [(Terminal(), True), (io.StringIO(), False)])
def test_the_progress_is_one_line_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, shown: bool
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress() as progress:
        show = progress.of("checkpointing")
        show(4)
        show(315)
    text = stream.getvalue()
    assert ("run 2: checkpointing, batch 315" in text) is shown
    assert "\n" not in text
    assert text.endswith("\r\033[K") is shown
