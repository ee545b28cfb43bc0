"""What the commands of `fleet` take beside what they share with those for one node."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import typer

from gpumem_exporter.cli.action_requests import RequestOptions, TimedRequest
from gpumem_exporter.cli.commands.clear import ClearRequest
from gpumem_exporter.cli.commands.fraction import FractionRequest
from gpumem_exporter.cli.fleet.prometheus import Prometheus
from gpumem_exporter.cli.options import AccessOptions, read_token
from gpumem_exporter.errors import ConfigurationError

__all__ = [
    "ActOptions",
    "FleetClearOptions",
    "FleetFractionOptions",
    "FleetOptions",
    "FleetTimedOptions",
    "LookOptions",
]

EVERY_EXPORTER = 'up{job="gpumem"}'


@dataclass(frozen=True, kw_only=True)
class FleetOptions(AccessOptions):
    """Which Prometheus is asked, and how its series lead to exporters."""

    prometheus: Annotated[
        str | None,
        typer.Option(
            "--prometheus",
            metavar="URL",
            help="The API that is queried: Prometheus, Thanos, Mimir or Cortex, up to what stands before /api/v1. "
            "http or https; user:password@ is basic auth. Default: GPUMEM_PROMETHEUS_URL.",
        ),
    ] = None
    prometheus_token_file: Annotated[
        str | None,
        typer.Option(
            "--prometheus-token-file",
            metavar="PATH",
            help="File with a bearer token for it. Default: GPUMEM_PROMETHEUS_TOKEN_FILE.",
        ),
    ] = None
    prometheus_headers: Annotated[
        list[str] | None,
        typer.Option(
            "--prometheus-header",
            metavar="'NAME: VALUE'",
            help="A header for it, such as 'X-Scope-OrgID: gpu'. May be given again.",
        ),
    ] = None
    instance_url: Annotated[
        str,
        typer.Option(
            "--instance-url",
            metavar="TEMPLATE",
            help="Where the exporter of a series is, such as https://{instance}: each {label} stands for what that "
            "label says.",
        ),
    ] = "http://{instance}"
    parallel: Annotated[
        int, typer.Option("--parallel", metavar="N", min=1, max=256, help="How many exporters are asked at a time.")
    ] = 16

    def connect(self, environ: Mapping[str, str] = os.environ) -> Prometheus:
        """The Prometheus that is meant.

        Raises:
            ConfigurationError: none is, or what is said of it is wrong.
        """
        url = self.prometheus or environ.get("GPUMEM_PROMETHEUS_URL", "").strip()
        if not url:
            raise ConfigurationError("no Prometheus; give --prometheus URL, or set GPUMEM_PROMETHEUS_URL")
        path = self.prometheus_token_file or environ.get("GPUMEM_PROMETHEUS_TOKEN_FILE", "").strip()
        headers = dict(_header(text) for text in self.prometheus_headers or ())
        return Prometheus(url, token=read_token(path) if path else "", headers=headers)


@dataclass(frozen=True, kw_only=True)
class LookOptions(FleetOptions):
    """Which exporters are looked at."""

    query: Annotated[
        str,
        typer.Option("--query", metavar="PROMQL", help="The exporters of its series are shown."),
    ] = EVERY_EXPORTER


@dataclass(frozen=True, kw_only=True)
class ActOptions(RequestOptions, FleetOptions):
    """Whom an action means on a fleet."""

    query: Annotated[
        str,
        typer.Option(
            "--query",
            metavar="PROMQL",
            help="The processes of its series are meant: the exporter by `instance`, there by `pid`, `workload`, "
            "`rank`, `gpu` and `uuid`, as far as a series has them.",
        ),
    ]
    max_processes: Annotated[
        int, typer.Option("--max-processes", metavar="N", min=1, help="More than so many, and nothing is done.")
    ] = 100


@dataclass(frozen=True, kw_only=True)
class FleetTimedOptions(TimedRequest, ActOptions):
    """Whom an action means on a fleet, and when it runs there."""


@dataclass(frozen=True, kw_only=True)
class FleetClearOptions(ClearRequest, FleetTimedOptions):
    """What `fleet clear` takes."""


@dataclass(frozen=True, kw_only=True)
class FleetFractionOptions(FractionRequest, FleetTimedOptions):
    """What `fleet fraction` takes."""


def _header(text: str) -> tuple[str, str]:
    name, colon, value = (part.strip() for part in text.partition(":"))
    named = bool(name) and all(c.isascii() and (c.isalnum() or c in "!#$%&'*+-.^_`|~") for c in name)
    if not (colon and named and value.isascii() and value.isprintable()):
        raise ConfigurationError(f"--prometheus-header {name or text!r}: expected 'NAME: VALUE' in printable ASCII")
    return name, value
