"""A real Prometheus in its own process."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import trustme
import yaml

from tests.support.ports import free_port
from tests.support.waiting import wait_for


class RunningPrometheus:
    """A Prometheus that scrapes every second; it is ready after construction.

    `targets` are `host:port` by the label `instance`; two names may have the same exporter. `clusters` are the values
    of the label `cluster` by instance. With an `authority`, its API uses https. `scrape` has more keys of the scrape
    configuration, such as `scheme`; `flags` are more flags of Prometheus.
    """

    def __init__(
        self,
        folder: Path,
        targets: Mapping[str, str],
        authority: trustme.CA | None = None,
        scrape: Mapping[str, Any] | None = None,
        clusters: Mapping[str, str] | None = None,
        flags: Sequence[str] = (),
    ) -> None:
        binary = shutil.which("prometheus")
        assert binary, "prometheus is not on PATH: run the tests by `sh tests/run.sh`, which brings it"
        folder.mkdir(parents=True, exist_ok=True)
        jobs = [
            # Prometheus drops an empty label.
            {"targets": [address], "labels": {"instance": name, "cluster": (clusters or {}).get(name, "")}}
            for name, address in targets.items()
        ]
        configuration = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
            "scrape_configs": [{"job_name": "gpumem", "static_configs": jobs, **(scrape or {})}],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
        address = f"127.0.0.1:{free_port()}"
        self.url = f"http://{address}" if authority is None else f"https://{address}"
        self._trusted = None if authority is None else _serve_https(folder, authority)
        web = () if authority is None else (f"--web.config.file={folder / 'web.yml'}",)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._popen = subprocess.Popen(
            [
                binary,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
                "--log.level=warn",
                *web,
                *flags,
            ],
            stdout=self._log,
            stderr=self._log,
        )
        wait_for(self._ready, "Prometheus")

    def log(self) -> str:
        """The log."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def close(self) -> None:
        """Stop Prometheus."""
        self._popen.terminate()
        try:
            self._popen.wait(30)
        finally:
            self._popen.kill()
            self._log.close()

    def __enter__(self) -> RunningPrometheus:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _ready(self) -> bool:
        assert self._popen.poll() is None, self.log()
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5, context=self._trusted) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False


def _serve_https(folder: Path, authority: trustme.CA) -> ssl.SSLContext:
    """Write the configuration for https, and return the TLS context of a client."""
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(folder / "own.pem"))
    server = {"cert_file": "own.pem", "key_file": "own.pem"}
    (folder / "web.yml").write_text(yaml.safe_dump({"tls_server_config": server}))
    trusted = ssl.create_default_context()
    authority.configure_trust(trusted)
    return trusted
