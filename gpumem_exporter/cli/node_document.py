"""The whole node at one time, as `info` and `top` show it.

Documents of devices and of processes that are read one after the other may contradict each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpumem_client.wire.errors import ExporterUnreachableError
from gpumem_client.wire.http import shown_url
from gpumem_exporter.cli.api_client import ExporterApi

__all__ = ["devices_and_processes", "read_node"]

Document = Mapping[str, Any]

_PATH = "/api/v1/live?processes=documents"
_OF_DEVICES = ("source", "taken_unix_seconds", "nvml", "devices")
_OF_PROCESSES = ("source", "processes")


def read_node(api: ExporterApi) -> Document:
    """Return the document of the whole node.

    Raises:
        ExporterUnreachableError: no address answers, or the answer is not an exporter's.
        ExporterAnswerError: the exporter answers with an error.
    """
    live = api.get(_PATH)
    problem = "is not a gpumem-exporter"
    try:
        state = live["state"]
        known = all(name in state for name in (*_OF_DEVICES, *_OF_PROCESSES))
        if "columns" in state:  # the rows of the page: the exporter does not know the parameter
            problem = f"is of version {state['version']}, which is too old for this command"
        elif known and all("pid" in process for process in state["processes"]):
            return live
    except (KeyError, TypeError):
        pass
    raise ExporterUnreachableError(f"the server at {shown_url(api.url)} {problem}")


def devices_and_processes(live: Document) -> tuple[Document, Document]:
    """Return the two parts as `/api/v1/devices` and `/api/v1/processes` have them."""
    state = live["state"]
    return {name: state[name] for name in _OF_DEVICES}, {name: state[name] for name in _OF_PROCESSES}
