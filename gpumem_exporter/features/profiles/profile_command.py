"""`profile`: which lines and which objects hold the memory of a process, now or over a recording."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import click

from gpumem_client.wire.errors import ConfigurationError
from gpumem_client.wire.units import human_bytes, human_seconds
from gpumem_exporter.actions.kinds import is_done
from gpumem_exporter.cli.action_dialog import act
from gpumem_exporter.cli.api_client import Document, ExporterApi
from gpumem_exporter.cli.completion import PROFILE_IDS, SELECTORS
from gpumem_exporter.cli.options import (
    action_options,
    action_request,
    api_options,
    job_option,
    option_group,
    pop_target,
    target_options,
)
from gpumem_exporter.cli.program import FAILED
from gpumem_exporter.cli.render.action_tables import reasons
from gpumem_exporter.cli.render.columns import local_time
from gpumem_exporter.cli.render.terminal import open_console, plain, print_result, show, table
from gpumem_exporter.cli.usage import CommandGroup, note
from gpumem_exporter.core.ledger import sum_of_known
from gpumem_exporter.errors import ProfileInvalidError
from gpumem_exporter.features.profiles.profile_diff import difference
from gpumem_exporter.features.profiles.profile_formats import SUFFIXES, read_saved, render
from gpumem_exporter.features.profiles.profile_lines import Format, ShownProfile
from gpumem_exporter.features.profiles.terminal_tables import profile_tables, subject

_EXAMPLES = """\b
Examples:
  gpumem-exporter profile 4711                        # what is allocated now, by owner
  gpumem-exporter profile 4711 --search 5s            # also what refers to other tensors
  gpumem-exporter profile 4711 --duration 30s -o profile.html
  gpumem-exporter profile --workload llm-pretrain --rank 0 --format pprof
  gpumem-exporter profile list --job llm-pretrain
  gpumem-exporter profile show 3f2a --format html
  gpumem-exporter profile diff 3f2a 9bc1              # what grew

\b
`profile 4711` is short for `profile take 4711`; `profile take --help` has its options. An ID may be shortened, as in
the list.
"""
_PATH = "/api/v1/profiles"
_SHOWN_ID = 8


class _ProfileGroup(CommandGroup):
    """A group whose command `take` needs no name."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Add `take` before a process or an option of it."""
        named = args and (args[0] in self.commands or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if named or ctx.resilient_parsing else ["take", *args])


_output_options = option_group(
    click.option(
        "--format",
        "form",
        type=click.Choice(["text", *SUFFIXES]),
        metavar="FORMAT",
        help=f"text, {', '.join(SUFFIXES)}. Default: from the name of the -o file, otherwise text.",
    ),
    click.option(
        "--moment",
        type=click.Choice(["live", "peak"]),
        metavar="MOMENT",
        default="live",
        show_default=True,
        help="live: at the end. peak: at the highest moment of the recording. A page has both.",
    ),
    click.option(
        "-o",
        "output",
        metavar="FILE",
        help="Write to this file. Default: standard output; for html and pprof on a terminal, a file in this folder.",
    ),
)


@click.group(cls=_ProfileGroup, epilog=_EXAMPLES, no_args_is_help=False)
def profile() -> None:
    """Show which lines and objects hold the memory of a process."""


@profile.command("take")
@click.argument("pids", nargs=-1, metavar="[PID]...", shell_complete=SELECTORS["pid"])
@option_group(_output_options, target_options, action_options("profile"), api_options)
def take(api: ExporterApi, pids: Sequence[str], **values: Any) -> int:
    """Take profiles of processes.

    Without --duration: the allocated memory now, by owner: parameters, gradients, optimizer state, tensors in global
    and local variables. With --duration, the process records its allocations meanwhile. The profile then also has the
    lines of code that allocated, and the highest moment. With --search, it also names what refers to other tensors.
    """
    values["pid"] = (*values["pid"], *pids)
    file, target = _Output.pop(values), pop_target(values, required=True).document()
    body = {**action_request("profile", values, on_terminal=False), "target": target}
    # First: the cost of a profile is printed before the profile starts, and -o is for one process.
    expected = api.submit({**body, "dry_run": True})
    processes = {result["pid"] for result in expected["results"] if is_done(result["outcome"])}
    if file.path is not None and len(processes) > 1:
        raise ConfigurationError(
            f"-o {file.path}: the target has {len(processes)} processes; without -o, each has a file"
        )
    if body["dry_run"] or not processes:
        document = expected
    else:
        note(_cost(body["duration_seconds"], body["search_seconds"]))
        document = act(api, body)
    taken = dict.fromkeys(result["profile"] for result in document["results"] if result.get("profile"))
    for profile_id in taken:
        file.write(api, f"{_PATH}/{profile_id}", one=len(taken) == 1)
    if taken and file.as_text:
        ids = ", ".join(each[:_SHOWN_ID] for each in taken)
        note(f"kept as {ids}; a page with a flame graph: gpumem-exporter profile show ID -o profile.html")
    for reason in reasons(document["results"]):
        print(reason, file=sys.stderr)
    if body["dry_run"] or not document["results"]:
        print(document["sentence"])
    complete = bool(document["results"]) and all(is_done(result["outcome"]) for result in document["results"])
    return 0 if complete and (taken or body["dry_run"]) else FAILED


def _cost(duration_seconds: float, search_seconds: float) -> str:
    """Return what a profile costs, from the measurements in docs/profiles.md."""
    cost = "The process stands still for about as long as a full garbage collection takes."
    if duration_seconds:
        cost = (
            f"The process records for {human_seconds(duration_seconds)}, which costs about 2 µs for each allocation. "
            "At the end it stands still for about 4 ms per 1,000 blocks."
        )
    if search_seconds:
        cost += (
            f" Then it searches its objects for up to {human_seconds(search_seconds)}. Its work may take twice as long "
            "meanwhile, and it uses 50 MiB of host memory per million objects."
        )
    return cost


@profile.command("list")
@click.option("--pid", metavar="PID", shell_complete=SELECTORS["pid"], help="Only profiles of this process.")
@click.option("--workload", metavar="NAME", shell_complete=SELECTORS["workload"], help="Only of this workload.")
@job_option("Only of this job")
@api_options
def list_profiles(api: ExporterApi, as_json: bool, **filters: str | None) -> int:
    """List the profiles that the exporter keeps.

    The newest is first. Without serve --storage.path, it keeps the last eight. You see the profiles of the processes
    that you may act on.
    """
    query = {name: value for name, value in filters.items() if value}
    document = api.get(f"{_PATH}?{urlencode(query)}")
    rows = [[cell(each) for cell in _CELLS.values()] for each in document["profiles"]]
    print_result(document, [table("", [*_CELLS], rows) if rows else plain("No profiles.")], as_json=as_json)
    return 0


def _sum(kept: Document, name: str) -> str:
    return human_bytes(sum_of_known([device[name] for device in kept["devices"]]))


_CELLS: Mapping[tuple[str, str], Callable[[Document], str]] = {
    ("id", "left"): lambda kept: kept["id"][:_SHOWN_ID],
    ("taken", "left"): lambda kept: local_time(kept["unix_seconds"], time.time()),
    ("cause", "left"): lambda kept: kept["cause"].replace("_", " "),
    ("of", "cut"): subject,
    ("recorded", "right"): lambda kept: human_seconds(kept["recorded_seconds"]) if kept["recorded_seconds"] else "no",
    ("allocated", "right"): lambda kept: _sum(kept, "allocated_bytes"),
    ("highest", "right"): lambda kept: _sum(kept, "peak_bytes"),
}


@profile.command("show")
@click.argument("profile_id", metavar="ID", shell_complete=PROFILE_IDS)
@option_group(_output_options, api_options)
def show_profile(api: ExporterApi, profile_id: str, **values: Any) -> int:
    """Show a profile that the exporter keeps."""
    file = _Output.pop(values)
    file.write(api, f"{_PATH}/{api.full_id('profile', profile_id)}")
    return 0


@profile.command("diff")
@click.argument("before", metavar="A", shell_complete=PROFILE_IDS)
@click.argument("after", metavar="B", shell_complete=PROFILE_IDS)
@option_group(_output_options, api_options)
def diff_profiles(api: ExporterApi, before: str, after: str, **values: Any) -> int:
    """Show what grew from profile A to profile B.

    A and B are ids, or files that --format json wrote. Stacks and owners are compared by what they show. In two
    processes, a stack that only one of them has is compared with the stack of the same functions and files, because
    lines may have moved.
    """
    file = _Output.pop(values)
    if not any(Path(each).is_file() for each in (before, after)):
        old, new = (api.full_id("profile", each) for each in (before, after))
        file.write(api, f"{_PATH}/{old}/diff/{new}")
    else:
        profiles = [_read(api, each, file.moment) for each in (before, after)]
        name = "-".join(each.about["id"][:_SHOWN_ID] for each in profiles)
        file.put(render([difference(*profiles)], file.form)[0], name)
    return 0


def _read(api: ExporterApi, given: str, moment: str) -> ShownProfile:
    """Return the profile in a file, or the profile with an id."""
    try:
        if Path(given).is_file():
            return read_saved(json.loads(Path(given).read_bytes()))
    except (OSError, ValueError, ProfileInvalidError) as error:
        raise ConfigurationError(f"{given}: {error}; give a file that --format json wrote") from error
    return read_saved(json.loads(api.get_bytes(f"{_PATH}/{api.full_id('profile', given)}?moment={moment}")))


@dataclass(frozen=True, slots=True)
class _Output:
    """Where profiles are written, and in which format."""

    form: Format
    as_text: bool
    """Shown as text, which is made of JSON."""
    moment: str
    path: str | None

    @classmethod
    def pop(cls, values: dict[str, Any]) -> _Output:
        """Remove the values of `_output_options` and --json from `values`, and return where they write."""
        form, path, as_json = values.pop("form"), values.pop("output"), values.pop("as_json")
        if as_json and form not in (None, "json"):
            raise ConfigurationError(f"--json and --format {form}: give one of them")
        # Before a recording that would be lost.
        if path is not None and not os.access(Path(path).parent, os.W_OK):
            raise ConfigurationError(f"-o {path}: cannot write to this folder")
        by_name = next((name for name, suffix in SUFFIXES.items() if (path or "").endswith(f".{suffix}")), "text")
        chosen: Any = form or ("json" if as_json else by_name)
        return cls("json" if chosen == "text" else chosen, chosen == "text", values.pop("moment"), path)

    def write(self, api: ExporterApi, path: str, *, one: bool = True) -> None:
        """Write the profile of a path of the API; if it is not the only one, to a file of its own."""
        query = urlencode({"format": self.form, "moment": self.moment})
        ids = path.removeprefix(f"{_PATH}/").split("/diff/")
        self.put(api.get_bytes(f"{path}?{query}"), "-".join(each[:_SHOWN_ID] for each in ids), one=one)

    def put(self, body: bytes, name: str, *, one: bool = True) -> None:
        """Write a profile, or a difference."""
        # A terminal shows no page and no pprof: without -o, they become a file in the current folder.
        path, is_binary = self.path, self.form != "json"
        if self.as_text:
            with Path(path).open("w", encoding="utf-8") if path is not None else nullcontext() as file:
                show(open_console(file), profile_tables(json.loads(body)))
            if path is None and not one:
                print()
        elif path is None and one and not (is_binary and sys.stdout.isatty()):
            sys.stdout.flush()
            sys.stdout.buffer.write(body if is_binary else body + b"\n")
        else:
            path = path or f"profile-{name}.{SUFFIXES[self.form]}"
            Path(path).write_bytes(body)
        if path is not None:
            print(path)
