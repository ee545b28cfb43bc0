"""A webhook in a process of its own, called over TLS as Kubernetes' API server calls it."""

from __future__ import annotations

import base64
import http.client
import json
import re
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from tests.support.builders.certificates import issue, trust
from tests.support.builders.pod_shapes import SHAPES, review_of
from tests.support.processes.running_command import clean_environment
from tests.support.waiting import patient, wait_for

REVIEW = review_of(SHAPES["indexed job"].pod)


class Webhook:
    """A running webhook, whose certificate and key are in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        files = ("--web.tls-cert-file", str(folder / "tls.crt"), "--web.tls-key-file", str(folder / "tls.key"))
        command = [sys.executable, "-m", "gpumem_exporter", "webhook", "--web.listen-address", "127.0.0.1:0", *files]
        self.connections: list[http.client.HTTPSConnection] = []
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stderr=log, env=clean_environment())
        self.port = int(wait_for(self._listening, "the address of the webhook")[1])

    def _listening(self) -> re.Match[str] | None:
        assert self.process.poll() is None, self.log.read_text()
        return re.search(r"listening.*https://127\.0\.0\.1:(\d+)", self.log.read_text())

    def connect(self, authority: str = "authority.crt") -> http.client.HTTPSConnection:
        """A connection that trusts this authority only."""
        context = ssl.create_default_context(cafile=str(self.folder / authority))
        connection = http.client.HTTPSConnection("localhost", self.port, context=context, timeout=patient(30))
        self.connections.append(connection)
        return connection

    def end(self) -> None:
        for connection in self.connections:
            connection.close()
        self.process.kill()
        self.process.wait()


@pytest.fixture
def webhook(tmp_path: Path) -> Iterator[Webhook]:
    authority = trustme.CA()
    issue(authority, tmp_path)
    trust(authority, tmp_path)
    running = Webhook(tmp_path)
    try:
        yield running
    finally:
        running.end()


def post(connection: http.client.HTTPSConnection, body: bytes, path: str = "/pods?timeout=3s") -> tuple[int, Any]:
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def test_it_answers_reviews_until_it_is_stopped(webhook: Webhook) -> None:
    connection = webhook.connect()
    status, answer = post(connection, json.dumps(REVIEW).encode())
    patch = json.loads(base64.b64decode(answer["response"]["patch"]))
    assert (status, answer["response"]["uid"]) == (200, REVIEW["request"]["uid"])
    assert {"/spec/volumes", "/spec/containers/0/env"} <= {operation["path"] for operation in patch}

    status, answer = post(connection, json.dumps(REVIEW).encode(), "/pods/without-host-path?timeout=3s")
    assert (status, "hostPath" in answer["response"]["warnings"][0]) == (200, True)

    assert post(webhook.connect(), b'{"kind": "Pod"}')[0] == 400
    assert post(webhook.connect(), b"{}", "/other")[0] == 404
    connection.request("GET", "/health")
    healthy = connection.getresponse()
    assert (healthy.status, json.loads(healthy.read())["status"]) == (200, "ok")

    webhook.process.send_signal(signal.SIGTERM)
    assert webhook.process.wait(patient(60)) == 0


def test_a_replaced_certificate_is_used_without_a_restart(webhook: Webhook) -> None:
    kept = webhook.connect()
    assert post(kept, json.dumps(REVIEW).encode())[0] == 200
    other = trustme.CA()
    trust(other, webhook.folder, "other.crt")
    (webhook.folder / "tls.crt").write_text("half of a certifica")
    wait_for(
        lambda: "what it contained before is in force" in webhook.log.read_text(),
        "the line about the invalid certificate",
    )
    assert post(webhook.connect(), json.dumps(REVIEW).encode())[0] == 200

    issue(other, webhook.folder)

    def trusted() -> bool:
        try:
            return post(webhook.connect("other.crt"), json.dumps(REVIEW).encode())[0] == 200
        except ssl.SSLCertVerificationError:
            return False

    wait_for(trusted, "the new certificate")
    with pytest.raises(ssl.SSLCertVerificationError):
        webhook.connect().connect()
    assert post(kept, json.dumps(REVIEW).encode())[0] == 200
