"""A real Prometheus in its own process."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml
from typing_extensions import Self

from tests.support.ports import free_port
from tests.support.waiting import wait_for


class RunningPrometheus:
    """A Prometheus that scrapes every second; it is ready after construction.

    `targets` are `host:port` by the label `instance`; two names may have the same exporter. `clusters` are the values
    of the label `cluster` by instance. `scrape` has more keys of the scrape configuration, such as `scheme`, and
    `rules` are files of rules, which it evaluates every second.
    """

    def __init__(
        self,
        folder: Path,
        targets: Mapping[str, str],
        scrape: Mapping[str, Any] | None = None,
        clusters: Mapping[str, str] | None = None,
        rules: Sequence[Path] = (),
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        jobs = [
            # Prometheus drops an empty label.
            {"targets": [address], "labels": {"instance": name, "cluster": (clusters or {}).get(name, "")}}
            for name, address in targets.items()
        ]
        configuration = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": list(map(str, rules)),
            "scrape_configs": [{"job_name": "gpumem", "static_configs": jobs, **(scrape or {})}],
        }
        address = f"127.0.0.1:{free_port()}"
        self.url = f"http://{address}"
        file = folder / "prometheus.yml"
        file.write_text(yaml.safe_dump(configuration))
        command = [
            *("prometheus", f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}"),
            f"--web.listen-address={address}",
        ]
        self._running = ExitStack()
        log = self._running.enter_context(running(command, folder / "prometheus.log"))
        wait_for(lambda: "Server is ready to receive web requests" in log(), "Prometheus")

    def close(self) -> None:
        """Stop Prometheus."""
        self._running.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def running(command: Sequence[str], log: Path) -> Iterator[Callable[[], str]]:
    """Run a server and stop it at the end; yields a function that returns its log."""
    program = shutil.which(command[0])
    assert program, f"{command[0]} is not on PATH: run the tests by `sh tests/run.sh`, which brings it"
    with log.open("wb") as out:
        process = subprocess.Popen([program, *command[1:]], stdin=subprocess.DEVNULL, stdout=out, stderr=out)

    def read() -> str:
        assert process.poll() is None, log.read_text()
        return log.read_text()

    try:
        yield read
    finally:
        process.terminate()
        try:
            process.wait(30)
        finally:
            process.kill()
        print(log.read_text())  # pytest shows it where the test failed
