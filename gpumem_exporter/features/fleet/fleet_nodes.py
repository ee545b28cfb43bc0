"""The exporters and processes that a query of Prometheus selects, and questions to these exporters."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.pool import ThreadPool
from typing import Any, TypeVar

from gpumem_client.wire.errors import ConfigurationError, ExporterError
from gpumem_client.wire.http import shown_url
from gpumem_client.wire.trust import Trust
from gpumem_exporter.cli.api_client import Document, ExporterApi
from gpumem_exporter.cli.render.layout import natural
from gpumem_exporter.cli.usage import action_token, read_token
from gpumem_exporter.core.naming import json_pid
from gpumem_exporter.features.fleet.prometheus import Prometheus

S = TypeVar("S")
T = TypeVar("T")

_PLACEHOLDER = re.compile(r"\{([a-zA-Z_][a-zA-Z0-9_]*)\}")
# What a label may insert into a URL: a name, an address, a port, and nothing that leads to another host.
_SAFE_IN_URL = re.compile(r"[A-Za-z0-9._:\[\]-]+")


@dataclass(frozen=True, slots=True)
class Exporter:
    """An exporter of the fleet."""

    url: str
    instance: str = field(compare=False)
    """The `instance` label of its series; of several at one URL, the first one."""


@dataclass(frozen=True, slots=True)
class Selector:
    """The labels of a series that select processes of one exporter; None for a label that the series lacks."""

    pid: int | str | None = None
    workload: str | None = None
    rank: str | None = None
    gpu: str | None = None
    uuid: str | None = None

    def admits(self, process: Document) -> bool:
        """Return whether the labels select a process of `/api/v1/processes`."""
        own = all(getattr(self, name) in (None, process[name]) for name in ("pid", "workload", "rank"))
        return own and bool(self.uuids(process) or not (self.gpu or self.uuid))

    def uuids(self, process: Document) -> list[str]:
        """Return the selected devices of a process."""
        return [
            device["uuid"]
            for device in process["devices"]
            if self.uuid in (None, device["uuid"]) and self.gpu in (None, device["gpu"])
        ]


class Fleet:
    """Prometheus, and the exporters that its series name."""

    def __init__(self, values: dict[str, Any]) -> None:
        """Take the values of the options of `fleet` out of `values`."""
        self.as_json: bool = values.pop("as_json")
        self._instance_url: str = values.pop("instance_url")
        self._token = action_token(values.pop("token_file"))
        trust = Trust.from_environment()
        self._trust = replace(trust, insecure=values.pop("insecure") or trust.insecure)
        url, path, headers = (values.pop(f"prometheus{name}") for name in ("", "_token_file", "_headers"))
        self._prometheus = Prometheus(url, token=read_token(path) if path else "", headers=headers)

    def find(self, query: str) -> tuple[dict[Exporter, list[Selector]], tuple[str, ...]]:
        """Return what a query selects of each exporter, in natural order, and the warnings of Prometheus."""
        series, warnings = self._prometheus.query(query)
        return selected_by(series, self._instance_url), warnings

    def api(self, url: str) -> ExporterApi:
        """Return the API of one exporter."""
        return ExporterApi((url,), token=self._token, token_for_reads=False, trust=self._trust)

    def ask(
        self, asked: Sequence[tuple[Exporter, S]], question: Callable[[ExporterApi, S], T], *, at_a_time: int = 16
    ) -> list[T | ExporterError]:
        """Return what each exporter answers to its question, or its error."""

        def answer(of: tuple[Exporter, S]) -> T | ExporterError:
            try:
                with self.api(of[0].url) as api:
                    return question(api, of[1])
            except ExporterError as error:
                return error

        # The threads are daemons, unlike the threads of concurrent.futures: Ctrl-C does not wait for a node that hangs.
        with ThreadPool(max(1, min(at_a_time, len(asked)))) as pool:
            results = pool.map_async(answer, asked, chunksize=1)
            # A signal that arrives right before the wait is seen after it only.
            while not results.ready():
                results.wait(0.1)
            return results.get()


def selected_by(series: Sequence[Mapping[str, str]], template: str) -> dict[Exporter, list[Selector]]:
    """Return what some series select of each exporter, each once; `Selector()` is every process."""
    found: dict[Exporter, list[Selector]] = {}
    for labels in series:
        url = _PLACEHOLDER.sub(lambda match: _address_part(match[1], labels), template)  # noqa: B023 - called at once
        exporter = Exporter(url, labels.get("instance") or shown_url(url).partition("://")[2])
        pid, *others = (labels.get(name) or None for name in Selector.__annotations__)
        found.setdefault(exporter, []).append(Selector(pid and json_pid(pid), *others))
    in_order = sorted(found, key=lambda exporter: natural(exporter.instance))
    return {exporter: list(dict.fromkeys(found[exporter])) for exporter in in_order}


def _address_part(name: str, labels: Mapping[str, str]) -> str:
    """Return the value of a label, checked for its use in a URL."""
    if not _SAFE_IN_URL.fullmatch(value := labels.get(name, "")):
        raise ConfigurationError(
            f"--query: {name}={value[:200]!r} of a series is not the address of an exporter; "
            f"keep the label, as in `sum by ({name}, pid) (...)`, or set --instance-url"
        )
    return value
