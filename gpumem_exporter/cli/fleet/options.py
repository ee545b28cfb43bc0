"""The options of `fleet` besides those of the commands for one node."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from gpumem_client.wire.errors import ConfigurationError
from gpumem_client.wire.trust import Trust
from gpumem_exporter.cli.fleet.prometheus import Prometheus
from gpumem_exporter.cli.options import AccessOptions, read_token

__all__ = ["FleetOptions", "OverviewOptions", "SelectionOptions"]

_EVERY_EXPORTER = 'up{job="gpumem"}'
_HEADER_NAME_PUNCTUATION = "!#$%&'*+-.^_`|~"


@dataclass(frozen=True, kw_only=True)
class FleetOptions(AccessOptions):
    """How to query Prometheus, and how to find the exporter of a series."""

    prometheus: Annotated[
        str | None,
        typer.Option(
            "--prometheus",
            metavar="URL",
            help="The API of Prometheus, Thanos, Mimir or Cortex: the part of its http or https URL before /api/v1. "
            "user:password@ is basic auth. Default: GPUMEM_PROMETHEUS_URL.",
        ),
    ] = None
    prometheus_token_file: Annotated[
        str | None,
        typer.Option(
            "--prometheus-token-file",
            metavar="PATH",
            help="File with a bearer token for the API. Default: GPUMEM_PROMETHEUS_TOKEN_FILE.",
        ),
    ] = None
    prometheus_headers: Annotated[
        list[str] | None,
        typer.Option(
            "--prometheus-header",
            metavar="'NAME: VALUE'",
            help="A header for the API, such as 'X-Scope-OrgID: gpu' (repeatable).",
        ),
    ] = None
    instance_url: Annotated[
        str,
        typer.Option(
            "--instance-url",
            metavar="TEMPLATE",
            help="URL of a series' exporter, such as https://{instance}; {label} is the value of that label.",
        ),
    ] = "http://{instance}"
    parallel: Annotated[
        int, typer.Option("--parallel", metavar="N", min=1, max=256, help="Exporters that are queried at a time.")
    ] = 16
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Send the token also to other machines without https. Default: GPUMEM_EXPORTER_INSECURE=1.",
        ),
    ] = False

    def trust(self, environ: Mapping[str, str] = os.environ) -> Trust:
        """Return the servers that receive the token.

        Raises:
            ConfigurationError: GPUMEM_EXPORTER_USER is not a user.
        """
        trust = Trust.from_environment(environ)
        return replace(trust, insecure=trust.insecure or self.insecure)

    def connect(self, environ: Mapping[str, str] = os.environ) -> Prometheus:
        """Return the API to query.

        Raises:
            ConfigurationError: there is no URL, or an option is invalid.
        """
        url = self.prometheus or environ.get("GPUMEM_PROMETHEUS_URL", "").strip()
        if not url:
            raise ConfigurationError("no Prometheus; give --prometheus URL, or set GPUMEM_PROMETHEUS_URL")
        path = self.prometheus_token_file or environ.get("GPUMEM_PROMETHEUS_TOKEN_FILE", "").strip()
        headers = dict(_header(text) for text in self.prometheus_headers or ())
        return Prometheus(url, token=read_token(path) if path else "", headers=headers)


@dataclass(frozen=True, kw_only=True)
class OverviewOptions:
    """The exporters that `fleet info` and `fleet top` show."""

    query: Annotated[
        str,
        typer.Option("--query", metavar="PROMQL", help="Show the exporters of this query's series."),
    ] = _EVERY_EXPORTER


@dataclass(frozen=True, kw_only=True)
class SelectionOptions:
    """The processes of a fleet that act."""

    query: Annotated[
        str,
        typer.Option(
            "--query",
            metavar="PROMQL",
            help="Select the processes of this query's series: the exporter by `instance`, its processes by `pid`, "
            "`workload`, `rank`, `gpu` and `uuid`, where a series has these labels.",
        ),
    ]
    max_processes: Annotated[
        int,
        typer.Option("--max-processes", metavar="N", min=1, help="Do nothing if the query selects more processes."),
    ] = 100


def _header(text: str) -> tuple[str, str]:
    name, colon, value = (part.strip() for part in text.partition(":"))
    valid_name = bool(name) and all(c.isascii() and (c.isalnum() or c in _HEADER_NAME_PUNCTUATION) for c in name)
    if not (colon and valid_name and value.isascii() and value.isprintable()):
        raise ConfigurationError(f"--prometheus-header {name or text!r}: expected 'NAME: VALUE' in printable ASCII")
    return name, value
