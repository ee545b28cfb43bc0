"""A program that takes the place of kubectl: it lists the pods of a file, and really forwards ports to exporters."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.processes.running_command import clean_environment
from tests.support.waiting import wait_for


class FakeKubectl:
    """The environment of a command that runs the program, and the processes of the program that forward a port."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pods: list[dict[str, Any]] = []
        self._forwards: dict[str, Any] = {}
        self.refusal = ""
        """What the program prints instead of pods."""

    def add(self, node: str, to: str = "", *, mode: str = "forward", **metadata: str) -> str:
        """Add the pod of a node, whose port leads to the exporter at `to`; return its name."""
        name = f"gpumem-exporter-{len(self._pods)}"
        probe = {"httpGet": {"path": "/health", "port": "metrics", "scheme": to.partition(":")[0].upper()}}
        container = {"name": "exporter", "ports": [{"name": "metrics", "containerPort": 9844}], "readinessProbe": probe}
        self._pods.append(
            {
                "metadata": {"name": name, **metadata},
                "spec": {"nodeName": node, "containers": [container]},
            }
        )
        self._forwards[name] = {"port": int(to.rpartition(":")[2] or 0), "mode": mode}
        return name

    def environment(self, **changes: str) -> dict[str, str]:
        """Return the variables by which `gpumem-exporter` runs the program."""
        plan = {"pods": self._pods, "forwards": self._forwards, "refusal": self.refusal, "pids": str(self._folder)}
        (self._folder / "plan.json").write_text(json.dumps(plan))
        words = (sys.executable, "-m", "tests.support.servers.fake_kubectl", str(self._folder / "plan.json"))
        return {"GPUMEM_KUBECTL": shlex.join(words), **changes}

    def process_environment(self) -> dict[str, str]:
        """Return the whole environment of a command."""
        return clean_environment(**self.environment())

    def pids(self) -> list[int]:
        """Return the processes that have forwarded a port, the first one first."""
        return [
            int(path.suffix[1:]) for path in sorted(self._folder.glob("forward*"), key=lambda p: p.stat().st_mtime_ns)
        ]

    def wait_until_ended(self) -> None:
        """Wait until no process forwards a port; at least one did."""
        assert self.pids()
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in self.pids()), "the end of kubectl")


def main(plan: Mapping[str, Any], verb: str, *words: str) -> int:
    """Run the program."""
    if plan["refusal"]:
        print(plan["refusal"], file=sys.stderr)
        return 1
    if verb == "get":
        assert "gpumem" in words
        print(json.dumps({"kind": "List", "items": plan["pods"]}))
        return 0
    assert verb == "port-forward"
    pod, ports = words[-2].removeprefix("pod/"), words[-1].partition(":")
    forward = plan["forwards"][pod]
    Path(plan["pids"], f"forward-{pod}.{os.getpid()}").touch()
    if forward["mode"] == "hangs":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("this kubectl hangs", flush=True)
        time.sleep(600)
    if forward["mode"] == "refuses":
        print(f'error: error upgrading connection: pods "{pod}" is forbidden', file=sys.stderr)
        return 1
    _listen(int(ports[0] or 0), int(ports[2]), forward["port"])
    return 0


def _listen(local: int, remote: int, to: int) -> None:
    server = socket.create_server(("127.0.0.1", local))
    local = server.getsockname()[1]
    print(f"Forwarding from 127.0.0.1:{local} -> {remote}", flush=True)
    while True:
        accepted, _ = server.accept()
        print(f"Handling connection for {local}", flush=True)
        beyond = socket.create_connection(("127.0.0.1", to))
        for source, sink in ((accepted, beyond), (beyond, accepted)):
            threading.Thread(target=_copy, args=(source, sink), daemon=True).start()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    sys.exit(main(json.loads(Path(sys.argv[1]).read_text()), *sys.argv[2:]))
