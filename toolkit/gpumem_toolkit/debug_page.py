"""The page "Memory" of PyTorch's debug server (`torch.distributed.debug`), with all ranks side by side.

That server has no authentication, so the page and the handler behind it only read.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from typing import Any

from gpumem_client import memory_summary
from gpumem_client.hooks.out_of_memory import latest_oom
from gpumem_client.profile.aggregate import latest_owners
from gpumem_client.wire.units import human_bytes

_log = logging.getLogger("gpumem_toolkit")
_HANDLER = "gpumem"
_COLUMNS = ("allocated", "allocated_peak", "reserved", "reclaimable", "fragmented", "non_torch", "device_free")
_TEMPLATE = """{# torch's environment escapes nothing #}
{% extends "base.html" %}
{% block header %}<h1>{% block title %}Memory{% endblock %}</h1>{% endblock %}
{% block content %}
<table id="gpumem">
<tr>{% for cell in rows[0] %}<th>{{ cell | e }}</th>{% endfor %}</tr>
{% for row in rows[1:] %}<tr>{% for cell in row %}<td>{{ cell | e }}</td>{% endfor %}</tr>{% endfor %}
</table>
{% endblock %}
"""


def debug_handlers() -> list[Any] | None:
    """Return the handlers of PyTorch's debug server with the page Memory, which this rank then answers, too.

        from torch.distributed.debug import start_debug_server

        start_debug_server(handlers=toolkit.debug_handlers())  # in every rank

    The page shows the summary, the counts of `watch`, the largest owners of the last profile and the last out-of-memory
    error of all ranks. It needs torch 2.15
    and the Python packages jinja2, aiohttp and tabulate. Otherwise returns None, with which the server has its own
    pages, and logs the reason at level DEBUG.
    """
    try:
        import torch
        from torch._C._distributed_c10d import (  # type: ignore[attr-defined]
            _get_handler_names,
            _register_handler,
        )
        from torch.distributed.debug._debug_handlers import default_handlers
    except ImportError as error:
        _log.debug("no page of memory on PyTorch's debug server: %s", error)
        return None
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15):
        _log.debug("no page of memory on PyTorch's debug server: torch %s is older than 2.15", torch.__version__)
        return None
    if _HANDLER not in _get_handler_names():
        _register_handler(_HANDLER, _answer)
    return [*default_handlers(), MemoryPage()]


def _answer(_request: Any, response: Any) -> None:
    """Answer the summary of this rank. Called in a thread of torch's server."""
    summary, oom = memory_summary(), latest_oom()
    devices = [
        {
            "index": device.index,
            "name": device.name,
            **{name: getattr(device, f"{name}_bytes") for name in _COLUMNS},
            "components": dict(device.components),
        }
        for device in summary.devices
    ]
    last = None
    if oom is not None:
        last = {"requested": oom[1].requested_bytes, "seconds_ago": time.monotonic() - oom[0]}
    owners = latest_owners()
    document = {
        "devices": devices,
        "reason": summary.reason,
        "last_oom": last,
        "owners": owners.owners if owners is not None else [],
        "profiled_seconds_ago": time.monotonic() - owners.taken_seconds if owners is not None else 0.0,
    }
    response.set_content(json.dumps(document), "application/json")
    response.set_status(200)


class MemoryPage:
    """The page, in the process of the debug server on rank 0. It has the interface of torch's `DebugHandler`."""

    fetch_timeout = 60.0

    def routes(self) -> list[Any]:
        """Return the path of the page."""
        from torch.distributed.debug._frontend import Route

        return [Route("/gpumem", self._page)]

    def nav_links(self) -> list[Any]:
        """Return the link to the page."""
        from torch.distributed.debug._frontend import NavLink

        return [NavLink("/gpumem", "Memory")]

    def templates(self) -> dict[str, str]:
        """Return the template of the page."""
        return {"gpumem.html": _TEMPLATE}

    def dump(self) -> str:
        """Return the page as text, for `enabled_dumps={"gpumem"}`."""
        return "\n".join("\t".join(row) for row in self._rows())

    def dump_filename(self) -> str:
        """Return the start of the names of dumps."""
        return _HANDLER

    def _page(self, request: Any) -> Any:
        return request.frontend.render_template("gpumem.html", rows=self._rows())

    def _rows(self) -> list[Sequence[str]]:
        from torch.distributed.debug._frontend import fetch_all

        _, answers = fetch_all(_HANDLER, timeout=self.fetch_timeout)
        names = (name.replace("_", " ") for name in _COLUMNS)
        rows: list[Sequence[str]] = [
            ("rank", "device", *names, "components", "last out of memory", "owners in the last profile")
        ]
        for rank, answer in enumerate(answers):
            if answer.status_code != 200:
                rows.append((str(rank), f"no answer: {answer.status_code}"))
                continue
            document = json.loads(answer.text)
            oom = document["last_oom"]
            last = "" if oom is None else f"{human_bytes(oom['requested'])}, {oom['seconds_ago']:.0f} s ago"
            if not document["devices"]:
                rows.append((str(rank), document["reason"]))
            for device in document["devices"]:
                parts = ", ".join(f"{name} {human_bytes(size)}" for name, size in device["components"].items())
                sizes = (human_bytes(device[name]) for name in _COLUMNS)
                # A profile has all devices of its rank.
                owners = "" if device is not document["devices"][0] else _listed(document)
                rows.append((str(rank), f"cuda:{device['index']} {device['name']}", *sizes, parts, last, owners))
        return rows


def _listed(document: dict[str, Any]) -> str:
    owners = ", ".join(f"{name} {human_bytes(size)}" for name, size in document["owners"])
    return f"{document['profiled_seconds_ago']:.0f} s ago: {owners}" if owners else ""
