"""The question before `terminate` and `fleet terminate`: which processes it would end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gpumem_client.wire.errors import ConfigurationError
from gpumem_client.wire.units import counted
from gpumem_exporter.actions.kinds import is_done
from gpumem_exporter.cli.action_dialog import YES, answer, can_ask
from gpumem_exporter.cli.api_client import Document, ExporterApi
from gpumem_exporter.cli.render.action_tables import action_tables
from gpumem_exporter.cli.render.terminal import open_console, show

if TYPE_CHECKING:
    from rich.console import RenderableType


def must_ask(body: Document, *, yes: bool, as_json: bool) -> bool:
    """Return whether a request needs a yes. Raises ConfigurationError if it does and no one can answer."""
    if body["action"] != "terminate" or body["dry_run"] or yes:
        return False
    if as_json or not can_ask():
        raise ConfigurationError("terminate asks on a terminal before it ends processes; without one, add --yes")
    return True


def confirmed(document: Document, tables: Callable[[Document], Iterator[RenderableType]]) -> bool:
    """Show the results of a dry run, and ask whether to terminate the processes."""
    show(open_console(), tables(document))
    count = len(ends(document["results"]))
    if count and answer(f"Terminate {counted(count, 'process', 'processes')}? [y/N]") in YES:
        return True
    print("Nothing was terminated.")
    return False


def ends(results: Iterable[Mapping[str, Any]]) -> list[tuple[Any, Any]]:
    """Return the node and the pid of each process that would be terminated."""
    return list(dict.fromkeys((row.get("instance"), row["pid"]) for row in results if is_done(row["outcome"])))


def confirmed_termination(api: ExporterApi, body: Document) -> Document | None:
    """Show what would be terminated, and ask. Returns the termination of these processes; None if the answer is no."""
    dry_run = {**body, "dry_run": True}
    expected = api.submit(dry_run)
    if not expected["results"]:
        return dry_run  # not the request itself, which may match something by now
    if not confirmed(expected, action_tables):
        return None
    target = {name: values for name, values in body["target"].items() if name != "all"}
    return {**body, "target": {**target, "pid": [pid for _, pid in ends(expected["results"])]}}
