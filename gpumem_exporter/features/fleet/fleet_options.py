"""The options of `fleet` besides the options of the commands for one node."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import wraps
from typing import Any, TypeVar

import click

from gpumem_client.wire.errors import ConfigurationError, ExporterError
from gpumem_client.wire.trust import Trust
from gpumem_exporter.cli.api_client import ExporterApi
from gpumem_exporter.cli.connection import action_token, read_token
from gpumem_exporter.cli.options import access_options, option_group
from gpumem_exporter.features.fleet.node_selection import Exporter
from gpumem_exporter.features.fleet.prometheus import Prometheus

S = TypeVar("S")
T = TypeVar("T")

# How often the main thread wakes up while nodes answer.
_WAKE_SECONDS = 0.1
_EVERY_EXPORTER = 'up{job="gpumem"}'
_HEADER = re.compile(r"\s*([!#$%&'*+.^_`|~\w-]+)\s*:\s*([ -~]*)", re.ASCII)


_connections = option_group(
    click.option(
        "--prometheus",
        metavar="URL",
        help="The API of Prometheus, Thanos, Mimir or Cortex: the part of its http or https URL before /api/v1. "
        "user:password@ is basic auth. Default: GPUMEM_PROMETHEUS_URL.",
    ),
    click.option(
        "--prometheus-token-file",
        metavar="PATH",
        help="File with a bearer token for the API. Default: GPUMEM_PROMETHEUS_TOKEN_FILE.",
    ),
    click.option(
        "--prometheus-header",
        "prometheus_headers",
        multiple=True,
        metavar="'NAME: VALUE'",
        help="A header for the API, such as 'X-Scope-OrgID: gpu' (repeatable).",
    ),
    click.option(
        "--instance-url",
        metavar="TEMPLATE",
        default="http://{instance}",
        show_default=True,
        help="URL of a series' exporter, such as https://{instance}; {label} is the value of that label.",
    ),
    click.option(
        "--parallel",
        type=click.IntRange(1, 256),
        metavar="N",
        default=16,
        show_default=True,
        help="Exporters that are queried at a time.",
    ),
    click.option(
        "--insecure",
        is_flag=True,
        help="Send the token also to other machines without https. Default: GPUMEM_EXPORTER_INSECURE=1.",
    ),
    access_options,
)
overview_options = click.option(
    "--query",
    metavar="PROMQL",
    default=_EVERY_EXPORTER,
    show_default=True,
    help="Show the exporters of this query's series.",
)
selection_options = option_group(
    click.option(
        "--query",
        metavar="PROMQL",
        required=True,
        help="Select the processes of this query's series: the exporter by `instance`, its processes by `pid`, "
        "`workload`, `rank`, `gpu` and `uuid`, where a series has these labels.",
    ),
    click.option(
        "--max-processes",
        type=click.IntRange(1),
        metavar="N",
        default=100,
        show_default=True,
        help="Do nothing if the query selects more processes.",
    ),
)


@dataclass(frozen=True, kw_only=True)
class FleetOptions:
    """How to query Prometheus, and how to find the exporter of a series."""

    prometheus: str | None = None
    prometheus_token_file: str | None = None
    prometheus_headers: Sequence[str] = ()
    instance_url: str = "http://{instance}"
    parallel: int = 16
    insecure: bool = False
    token_file: str | None = None
    as_json: bool = False

    def ask(
        self, exporters: Iterable[Exporter], question: Callable[[ExporterApi], T]
    ) -> dict[Exporter, T | ExporterError]:
        """Return the answer or the error of each exporter; `parallel` are asked at a time."""
        exporters = list(exporters)

        def answer(exporter: Exporter) -> T | ExporterError:
            try:
                with self.api(exporter.url) as api:
                    return question(api)
            except ExporterError as error:
                return error

        return dict(zip(exporters, in_threads(answer, exporters, self.parallel), strict=True))

    def api(self, url: str) -> ExporterApi:
        """Return the API of one exporter."""
        return ExporterApi((url,), token=action_token(self.token_file), token_for_reads=False, trust=self.trust())

    def trust(self, environ: Mapping[str, str] = os.environ) -> Trust:
        """Return the servers that receive the token."""
        trust = Trust.from_environment(environ)
        return replace(trust, insecure=trust.insecure or self.insecure)

    def connect(self, environ: Mapping[str, str] = os.environ) -> Prometheus:
        """Return the API to query."""
        action_token(self.token_file)  # wrong usage is an error before anything is sent
        url = self.prometheus or environ.get("GPUMEM_PROMETHEUS_URL", "").strip()
        if not url:
            raise ConfigurationError("no Prometheus; give --prometheus URL, or set GPUMEM_PROMETHEUS_URL")
        path = self.prometheus_token_file or environ.get("GPUMEM_PROMETHEUS_TOKEN_FILE", "").strip()
        headers = dict(_header(text) for text in self.prometheus_headers)
        return Prometheus(url, token=read_token(path) if path else "", headers=headers)


def fleet_options(command: Callable[..., int]) -> Callable[..., int]:
    """Add the options of every command of a fleet to a command, which receives them as `options`."""

    @_connections
    @wraps(command)
    def run(**values: Any) -> int:
        given = {item.name: values.pop(item.name) for item in fields(FleetOptions)}
        return command(options=FleetOptions(**given), **values)

    return run


def in_threads(work: Callable[[S], T], items: Sequence[S], count: int) -> list[T]:
    """Return the results of `work` on some items, on this number of them at a time."""
    from multiprocessing.pool import ThreadPool

    # The threads are daemons, unlike the threads of concurrent.futures: Ctrl-C does not wait for a node that hangs.
    with ThreadPool(max(1, min(count, len(items)))) as pool:
        results = pool.map_async(work, items, chunksize=1)
        # A signal that arrives right before the wait is seen after it only.
        while not results.ready():
            results.wait(_WAKE_SECONDS)
        return results.get()


def _header(text: str) -> tuple[str, str]:
    found = _HEADER.fullmatch(text.strip())
    if found is None:
        name = text.partition(":")[0].strip()  # the value may be a secret
        raise ConfigurationError(f"--prometheus-header {name or text!r}: expected 'NAME: VALUE' in printable ASCII")
    return found[1], found[2]
