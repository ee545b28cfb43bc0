"""`--kube`: commands and the page through `kubectl port-forward`, whose place a program takes that forwards ports."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest
import trustme

from tests.conftest import StartExporter
from tests.support.builders.certificates import issue
from tests.support.processes.running_command import run_command
from tests.support.servers.exporter_process import ExporterProcess, token_file
from tests.support.servers.fake_kubectl import FakeKubectl
from tests.support.waiting import patient, wait_for

TOKEN = "a-token-for-tests"


@pytest.fixture
def kubectl(tmp_path: Path) -> FakeKubectl:
    return FakeKubectl(tmp_path)


def test_a_command_shows_the_node_of_a_pod_and_ends_kubectl(kubectl: FakeKubectl, demo: ExporterProcess) -> None:
    kubectl.add("gpu-1", "http://127.0.0.1:1")
    kubectl.add("gpu-2", mode="refuses", deletionTimestamp="2026-01-01T00:00:00Z")
    pod = kubectl.add("gpu-2", demo.tcp_url)
    for target in (pod, "gpu-2"):
        ended = run_command("info", "--kube", target, "--json", **kubectl.environment())
        assert (ended.returncode, ended.stderr) == (0, "")
        assert json.loads(ended.stdout)["devices"]
        kubectl.wait_until_ended()


def test_over_tls_the_token_goes_through_the_port_of_this_user(
    kubectl: FakeKubectl, start_exporter: StartExporter, tmp_path: Path
) -> None:
    """The certificate has the name of the Service, and its authority is not known here."""
    issue(trustme.CA(), tmp_path)
    (tmp_path / "web.yml").write_text("tls_server_config: {cert_file: tls.crt, key_file: tls.key}\n")
    flags = ("--web.config.file", str(tmp_path / "web.yml"), "--action.token-file", token_file(tmp_path, TOKEN))
    kubectl.add("gpu-1", start_exporter(None, "--demo", *flags).tcp_url)
    clear = ("--kube", "gpu-1", "clear", "--workload", "demo-notebook", "--dry-run", "--json")
    refused = run_command(*clear, **kubectl.environment())
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "a token is required" in refused.stderr
    cleared = run_command(*clear, **kubectl.environment(GPUMEM_ACTION_TOKEN=TOKEN))
    assert cleared.returncode == 0, cleared.stderr
    assert json.loads(cleared.stdout)["freed_bytes"] > 0


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("elsewhere", "no node or pod 'elsewhere' in the namespace 'gpumem' with the label"),
        ("elsewhere", "the nodes are gpu-1, gpu-2"),
        ("gpu-2", 'error upgrading connection: pods "gpumem-exporter-1" is forbidden'),
        ("not listed", 'User "ada" cannot list resource "pods"'),
    ],
)
def test_what_kubernetes_refuses_is_one_line(kubectl: FakeKubectl, target: str, reason: str) -> None:
    kubectl.add("gpu-1", "http://127.0.0.1:1")
    kubectl.add("gpu-2", mode="refuses")
    if target == "not listed":
        kubectl.refusal = f"Error from server (Forbidden): pods is forbidden: {reason}"
    ended = run_command("--kube", target, "info", **kubectl.environment())
    assert (ended.returncode, ended.stdout) == (1, "")
    assert reason in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "code", "reason"),
    [
        ("no-kubectl", 2, "cannot run 'no-kubectl'"),
        ("kubectl 'unclosed", 2, "GPUMEM_KUBECTL"),
        ("echo no JSON", 1, "kubectl printed no list of pods"),
    ],
)
def test_a_command_that_is_not_kubectl_is_one_line(command: str, code: int, reason: str) -> None:
    ended = run_command("--kube", "gpu-1", "info", GPUMEM_KUBECTL=command)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (code, "", 1)
    assert reason in ended.stderr


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (("info", "--url", "http://127.0.0.1:1"), "--kube and --url"),
        (("clear",), "--gpu"),
    ],
)
def test_wrong_usage_is_reported_without_kubectl(kubectl: FakeKubectl, words: tuple[str, ...], wrong: str) -> None:
    kubectl.add("gpu-1", mode="hangs")
    ended = run_command("--kube", "gpu-1", *words, **kubectl.environment())
    assert ended.returncode == 2
    assert wrong in ended.stderr
    assert kubectl.pids() == []


@pytest.mark.parametrize("hangs", [False, True])
def test_ctrl_c_ends_kubectl(kubectl: FakeKubectl, demo: ExporterProcess, hangs: bool) -> None:
    kubectl.add("gpu-1", demo.tcp_url, mode="hangs" if hangs else "forward")
    with Page(kubectl, url=not hangs) as page:
        wait_for(kubectl.pids, "the start of kubectl")
        assert hangs or b"gpumem" in read(page.url)
        page.process.send_signal(signal.SIGINT)
        assert page.process.wait(patient(20)) == (130 if hangs else 0)
        kubectl.wait_until_ended()


def test_the_port_of_a_command_that_was_killed_leads_nobody_to_the_exporter(
    kubectl: FakeKubectl, demo: ExporterProcess
) -> None:
    kubectl.add("gpu-1", demo.tcp_url)
    with Page(kubectl) as page:
        page.process.kill()
        page.process.wait(patient(20))
        assert read(page.url) == b""
        kubectl.wait_until_ended()


def test_the_end_of_kubectl_ends_the_page_with_one_line(kubectl: FakeKubectl, demo: ExporterProcess) -> None:
    kubectl.add("gpu-1", demo.tcp_url)
    with Page(kubectl) as page:
        (pid,) = kubectl.pids()
        os.kill(pid, signal.SIGTERM)
        assert page.process.wait(patient(20)) == 1
        assert page.process.stderr is not None
        assert page.process.stderr.read().splitlines() == ["gpumem-exporter: kubectl port-forward ended: exit code -15"]


class Page:
    """`gpumem-exporter --kube gpu-1`, and the address that it prints."""

    def __init__(self, kubectl: FakeKubectl, *, url: bool = True) -> None:
        words = [sys.executable, "-m", "gpumem_exporter", "--kube", "gpu-1"]
        self.process = subprocess.Popen(
            words,
            env=kubectl.process_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A shell without job control lets its background programs, and so the tests, ignore Ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        assert self.process.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:\d+/", self.process.stdout.readline()) if url else None
        self.url = found[0] if found else ""

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.communicate()


def read(url: str) -> bytes:
    """Read a page; empty if it cannot be reached."""
    try:
        with urlopen(url, timeout=patient(10)) as answer:
            return bytes(answer.read())
    except OSError:
        return b""
