"""`fleet top`: the output of `fleet info`, live."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rich.console import Group
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.widgets import Footer, Static

from gpumem_client.wire.units import human_seconds
from gpumem_exporter.cli.fleet.overview import Overview
from gpumem_exporter.cli.live import LiveApp
from gpumem_exporter.cli.render.terminal import plain

if TYPE_CHECKING:
    from rich.console import RenderableType


class FleetTop(LiveApp[Overview]):
    """The devices of a fleet. If a reading fails, its error is shown above the last overview."""

    def __init__(self, read: Callable[[], Overview], first: Overview, *, interval_seconds: float) -> None:
        super().__init__(read, first, interval_seconds=interval_seconds)
        self._overview = Static()

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield self._overview
        yield Footer()

    def show(self) -> None:
        self._overview.update(Group(*self._parts()))

    def _parts(self) -> Iterator[RenderableType]:
        yield plain(f"gpumem-exporter fleet top  {human_seconds(max(0.1, self.age_seconds))} ago", "bold")
        if self.lost:
            yield plain(self.lost, "bold red")
        # A screen shows the start, a shell the end of an output: there, the sums are last.
        *rest, sums = self.reading.parts(self.size.width - 2)
        yield from (sums, *rest)
