"""Alertmanager with the project's configuration, a webhook receiver, and documents with shorter durations."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import yaml

from tests.support.paths import REPOSITORY
from tests.support.servers.http_servers import serving
from tests.support.servers.running_prometheus import running
from tests.support.waiting import wait_for

DEPLOY = REPOSITORY / "deploy"
SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = r"(?:\d+(?:ms|[smhd]))+"
# Durations are in range and subquery brackets, after `offset`, and the values of these keys.
_IN_RULES = re.compile(rf"(?<=\[){_DURATION}(?=[\]:])|(?<=\d[smhd]:){_DURATION}(?=\])|(?<=offset ){_DURATION}\b")
_KEYS = ("for", "keep_firing_for", "interval", "group_wait", "group_interval", "repeat_interval")


def hastened(document: Any, times: float) -> Any:
    """Divide every duration in a YAML document of rules or of Alertmanager by a factor."""

    def shorter(text: str) -> str:
        seconds = sum(int(number) * SECONDS[unit] for number, unit in re.findall(r"(\d+)(ms|[smhd])", text))
        return f"{round(1000 * seconds / times)}ms"

    if isinstance(document, list):
        return [hastened(each, times) for each in document]
    if not isinstance(document, dict):
        return document
    out = {key: shorter(value) if key in _KEYS else hastened(value, times) for key, value in document.items()}
    if "expr" in out:
        out["expr"] = _IN_RULES.sub(lambda match: shorter(match.group()), out["expr"])
    return out


@dataclass
class Receiver:
    """The notifications of Alertmanager's webhooks, in their order."""

    url: str
    notifications: list[Mapping[str, Any]] = field(default_factory=list)


@contextmanager
def receiving() -> Iterator[Receiver]:
    """Run a webhook receiver."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            receiver.notifications.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

    with serving(Handler) as server:
        receiver = Receiver(f"http://127.0.0.1:{server.server_port}/")
        yield receiver


@contextmanager
def alertmanager(folder: Path, webhook: str, *, times: float) -> Iterator[str]:
    """Run Alertmanager with the project's configuration and a webhook in each receiver; yields its address."""
    configuration = hastened(yaml.safe_load((DEPLOY / "alertmanager" / "alertmanager.yml").read_text()), times)
    for receiver in configuration["receivers"]:
        receiver["webhook_configs"] = [{"url": webhook, "send_resolved": True}]
    with running_alertmanager(folder, configuration) as address:
        yield address


@contextmanager
def running_alertmanager(folder: Path, configuration: Mapping[str, Any]) -> Iterator[str]:
    """Run Alertmanager; yields its address."""
    file = folder / "alertmanager.yml"
    file.write_text(yaml.safe_dump(configuration, sort_keys=False))
    command = [
        *("prometheus-alertmanager", f"--config.file={file}", f"--storage.path={folder / 'alertmanager'}"),
        *("--web.listen-address=127.0.0.1:0", "--cluster.listen-address="),
    ]
    with running(command, folder / "alertmanager.log") as log:
        listening = wait_for(lambda: re.search(r'msg="Listening on" address=(\S+)', log()), "Alertmanager")
        yield listening[1]
        log()  # it still runs
