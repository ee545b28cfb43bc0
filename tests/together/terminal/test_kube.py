"""`--kube`: commands and the page through `kubectl port-forward`, whose place a program takes that forwards ports."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
import trustme

from tests.conftest import StartExporter
from tests.support.certificates import issue
from tests.support.exporter_process import ExporterProcess
from tests.support.fake_kubectl import FakeKubectl
from tests.support.running_command import clean_environment, run_command
from tests.support.waiting import eventually, patient, wait_for

TOKEN = "a-token-for-tests"


@pytest.fixture(scope="module")
def exporter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExporterProcess]:
    exporter = ExporterProcess(tmp_path_factory.mktemp("exporter"), "--demo", environment=clean_environment())
    yield exporter
    exporter.close()


@pytest.fixture
def kubectl(tmp_path: Path) -> FakeKubectl:
    return FakeKubectl(tmp_path)


@pytest.mark.parametrize("by", ["node", "pod"])
def test_a_command_shows_the_node_and_ends_kubectl(kubectl: FakeKubectl, exporter: ExporterProcess, by: str) -> None:
    kubectl.add("gpu-1", "http://127.0.0.1:1")
    pod = kubectl.add("gpu-2", exporter.tcp_url)
    ended = run_command("--kube", "gpu-2" if by == "node" else pod, "info", "--json", **kubectl.environment())
    assert (ended.returncode, ended.stderr) == (0, "")
    assert json.loads(ended.stdout)["devices"]
    kubectl.wait_until_ended()


def test_over_tls_the_token_goes_through_the_port_of_this_user(
    kubectl: FakeKubectl, start_exporter: StartExporter, tmp_path: Path
) -> None:
    """The certificate has the name of the Service, and its authority is not known here."""
    issue(trustme.CA(), tmp_path)
    (tmp_path / "web.yml").write_text("tls_server_config: {cert_file: tls.crt, key_file: tls.key}\n")
    (tmp_path / "token").touch(0o600)
    (tmp_path / "token").write_text(TOKEN)
    flags = ("--web.config.file", str(tmp_path / "web.yml"), "--action.token-file", str(tmp_path / "token"))
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
        ("gpu-9", "did you mean 'gpu-"),
        ("elsewhere", "the nodes are gpu-1, gpu-2, gpu-3"),
        ("gpu-2", "waits: CrashLoopBackOff"),
        ("gpu-3", 'error upgrading connection: pods "gpumem-exporter-2" is forbidden'),
    ],
)
def test_what_kubernetes_refuses_is_one_line(kubectl: FakeKubectl, target: str, reason: str) -> None:
    kubectl.add("gpu-1", "http://127.0.0.1:1")
    kubectl.add("gpu-2", waiting="CrashLoopBackOff")
    kubectl.add("gpu-3", mode="refuses")
    ended = run_command("--kube", target, "info", **kubectl.environment())
    assert (ended.returncode, ended.stdout) == (1, "")
    assert reason in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_without_the_right_to_list_pods_the_reason_of_kubectl_is_shown(kubectl: FakeKubectl) -> None:
    kubectl.refusal = 'Error from server (Forbidden): pods is forbidden: User "ada" cannot list resource "pods"'
    ended = run_command("--kube", "gpu-1", "info", **kubectl.environment())
    assert ended.returncode == 1
    assert 'User "ada" cannot list resource "pods"' in ended.stderr


def test_a_missing_kubectl_is_wrong_usage() -> None:
    ended = run_command("--kube", "gpu-1", "info", GPUMEM_KUBECTL="no-kubectl")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "cannot run 'no-kubectl'" in ended.stderr


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (("info", "--url", "http://127.0.0.1:1"), "--kube and --url"),
        (("clear",), "--gpu"),
        (("clear", "--gpu", "0", "--settle", "soon"), "--settle"),
    ],
)
def test_wrong_usage_is_reported_without_kubectl(kubectl: FakeKubectl, words: tuple[str, ...], wrong: str) -> None:
    kubectl.add("gpu-1", mode="hangs")
    ended = run_command("--kube", "gpu-1", *words, **kubectl.environment())
    assert ended.returncode == 2
    assert wrong in ended.stderr
    assert kubectl.pids() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_command_that_ends_takes_kubectl_with_it(
    kubectl: FakeKubectl, exporter: ExporterProcess, number: signal.Signals
) -> None:
    kubectl.add("gpu-1", exporter.tcp_url)
    with Page(kubectl) as page:
        page.process.send_signal(number)
        assert page.process.wait(patient(20)) == (0 if number == signal.SIGINT else -number)
        kubectl.wait_until_ended()


def test_a_kubectl_that_hangs_is_ended(kubectl: FakeKubectl) -> None:
    kubectl.add("gpu-1", mode="hangs")
    with Page(kubectl, url=False) as page:
        wait_for(lambda: kubectl.pids(), "the start of kubectl")
        page.process.send_signal(signal.SIGINT)
        assert page.process.wait(patient(20)) == 130
        kubectl.wait_until_ended()


def test_the_page_returns_at_its_address_after_kubectl_ended(kubectl: FakeKubectl, exporter: ExporterProcess) -> None:
    kubectl.add("gpu-1", exporter.tcp_url)
    with Page(kubectl) as page:
        assert b"gpumem" in read(page.url)
        (pid,) = kubectl.pids()
        os.kill(pid, signal.SIGTERM)
        wait_for(lambda: len(kubectl.pids()) == 2, "another kubectl")
        assert b"gpumem" in eventually(lambda: read(page.url), bool, 30, "the page")


class Page:
    """`gpumem-exporter --kube gpu-1`, and the address that it prints."""

    def __init__(self, kubectl: FakeKubectl, *, url: bool = True) -> None:
        words = [sys.executable, "-m", "gpumem_exporter", "--kube", "gpu-1"]
        self.process = subprocess.Popen(
            words,
            env=kubectl.process_environment(),
            stdout=subprocess.PIPE,
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
