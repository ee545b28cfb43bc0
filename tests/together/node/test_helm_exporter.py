"""The exporter runs with the files, variables and probes that the Helm chart makes of values."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import bcrypt
import pytest
import trustme
import yaml

from tests.conftest import StartExporter
from tests.support.paths import REPOSITORY
from tests.support.processes.other_user import needs_root
from tests.support.servers.exporter_process import ExporterProcess
from tests.support.servers.helm import CHART, running_cluster
from tests.support.waiting import patient

pytest.importorskip("helm_sdkpy", reason="Helm's engine needs Python 3.12 or later")

POLICY = REPOSITORY / "deploy" / "policy.example.yml"


@pytest.fixture
def tls() -> dict[str, str]:
    """The values of a certificate for 127.0.0.1."""
    issued = trustme.CA().issue_cert("127.0.0.1")
    chain = "".join(blob.bytes().decode() for blob in issued.cert_chain_pems)
    return {"certificate": chain, "key": issued.private_key_pem.bytes().decode()}


class Pod:
    """The container of the DaemonSet and that of `helm test`, with the files of their volumes in a folder."""

    def __init__(self, folder: Path, values: dict[str, Any]) -> None:
        with running_cluster() as cluster:
            objects = cluster.objects(values)
        pod = objects["DaemonSet", "gpumem-exporter"]["spec"]["template"]["spec"]
        self.spec = pod
        (self.container,) = pod["containers"]
        self.init_containers = pod.get("initContainers", [])
        self.tests = [found["spec"]["containers"][0] for (kind, _), found in objects.items() if kind == "Pod"]
        self._folder = folder
        sources = {name: found for (kind, name), found in objects.items() if kind in ("Secret", "ConfigMap")}
        for mount in self.container["volumeMounts"]:
            (volume,) = (volume for volume in pod["volumes"] if volume["name"] == mount["name"])
            if "secret" in volume:
                self._write(mount["mountPath"], sources[volume["secret"]["secretName"]]["stringData"], 0o440)
                assert volume["secret"]["defaultMode"] == 0o440
            elif "configMap" in volume:
                self._write(mount["mountPath"], sources[volume["configMap"]["name"]]["data"], 0o644)

    def _write(self, mount_path: str, files: dict[str, str], mode: int) -> None:
        place = Path(self._local(mount_path))
        place.mkdir(parents=True)
        for name, text in files.items():
            (place / name).write_text(self._local(text))
            (place / name).chmod(mode)

    def _local(self, text: str) -> str:
        for path, local in (("/etc/gpumem/", "etc/"), ("/var/lib/", ""), ("/run/gpumem/client", "client")):
            text = text.replace(path, f"{self._folder}/{local}")
        return text

    def environment(self) -> dict[str, str]:
        (self._folder / "gpumem").mkdir()
        variables = {item["name"]: self._local(item["value"]) for item in self.container["env"]}
        return {**os.environ, **variables}

    def probe(self, exporter: ExporterProcess) -> int:
        """Run the command of the readiness probe and return its exit status."""
        python, *arguments = self.container["readinessProbe"]["exec"]["command"]
        assert python == "python"
        return run_python([text.replace("/run/gpumem/exporter.sock", str(exporter.socket)) for text in arguments])


def run_python(arguments: list[str]) -> int:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, check=False, timeout=patient(60)
    ).returncode


def test_the_exporter_uses_the_tokens_users_and_policy_of_the_values(
    start_exporter: StartExporter, tmp_path: Path, tls: dict[str, str]
) -> None:
    password = bcrypt.hashpw(b"scrape", bcrypt.gensalt(4)).decode()
    pod = Pod(
        tmp_path,
        {
            "tls": tls,
            "actionToken": {"value": "act"},
            "reportToken": {"value": "report"},
            "webConfig": {"basic_auth_users": {"prometheus": password}},
            "policy": yaml.safe_load(POLICY.read_text()),
            "settings": {"action.allow": ["default", "terminate"], "storage.max-bytes": 134217728},
        },
    )
    exporter = start_exporter(environment=pod.environment(), ready="/-/healthy")
    assert exporter.tcp_url.startswith("https://")
    assert list((tmp_path / "gpumem" / "events").iterdir())
    assert pod.tests == [], "`helm test` has no password"
    action = {"action": "terminate", "target": {"all": True}, "dry_run": True}
    for token, status in ((None, 401), ("report", 401), ("act", 200)):
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        answer = exporter.request("POST", "/api/v1/actions", action, headers)
        assert answer.status == status, answer
    assert pod.probe(exporter) == 0
    exporter.stop()
    assert pod.probe(exporter) != 0


def test_the_test_of_the_chart_passes_while_the_exporter_answers(
    start_exporter: StartExporter, tmp_path: Path, tls: dict[str, str]
) -> None:
    pod = Pod(tmp_path, {"tls": tls})
    assert pod.container["readinessProbe"]["httpGet"] == {"path": "/health", "port": "metrics", "scheme": "HTTPS"}
    (test,) = pod.tests
    python, *arguments = test["command"]
    assert python == "python"
    exporter = start_exporter(environment=pod.environment(), ready="/-/healthy")
    at_the_exporter = [text.replace("https://gpumem-exporter:9844", exporter.tcp_url) for text in arguments]
    assert run_python(at_the_exporter) == 0
    exporter.stop()
    assert run_python(at_the_exporter) != 0


@needs_root
def test_a_user_other_than_root_works_in_the_folders_that_the_init_container_gives_it() -> None:
    values = yaml.safe_load((CHART / "ci" / "nonroot-values.yaml").read_text())
    with tempfile.TemporaryDirectory(prefix="gpumem-") as name:
        node = Path(name)
        node.chmod(0o755)
        pod = Pod(node, {**values, "reportToken": {"value": "report"}})
        environment = pod.environment()
        (node / "run").mkdir()
        # What an exporter of root left.
        (node / "run" / "client").mkdir(0o755)
        (node / "gpumem" / "events").mkdir(0o700)
        give = [text.replace("/run/gpumem", f"{node}/run") for text in pod.init_containers[0]["command"]]
        give = [text.replace("/var/lib/gpumem", f"{node}/gpumem") for text in give]
        owner = give[-3]
        capabilities = ("setpriv", "--bounding-set=-all,+chown", "--inh-caps=-all")
        subprocess.run([*capabilities, *give], check=True)
        # The kubelet gives the files of Secrets to the group of fsGroup.
        for file in (node / "etc").rglob("*"):
            os.chown(file, 0, pod.spec["securityContext"]["fsGroup"])
        environment["GPUMEM_CLIENT_DIRECTORY"] = str(node / "run" / "client")
        uid, gid = owner.split(":")
        user = ("setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "--bounding-set=-all")
        with closing(
            ExporterProcess(node / "run", environment=environment, launcher=user, ready="/-/healthy")
        ) as exporter:
            caller = json.loads(exporter.request("GET", "/api/v1/caller").body)
            assert caller["rights"] == "all", "root on the socket, in a folder that root gave to the exporter's user"
            events = list((node / "gpumem" / "events").iterdir())
            assert {path.stat().st_uid for path in events} == {int(uid)}
            assert (node / "run" / "client" / "sitecustomize.py").is_file()
        subprocess.run([*capabilities, *give], check=True)  # before the next exporter starts


def test_a_socket_without_a_folder_of_the_host_is_in_a_folder_of_the_exporter(tmp_path: Path) -> None:
    pod = Pod(tmp_path, {"socket": {"hostPath": ""}})
    (mount,) = (mount for mount in pod.container["volumeMounts"] if mount["name"] == "socket")
    # The kubelet creates an emptyDir with this mode, with which the exporter refuses the folder of its socket.
    empty_dir = tmp_path / mount["mountPath"].lstrip("/")
    empty_dir.mkdir(parents=True)
    empty_dir.chmod(0o777)
    with closing(
        ExporterProcess(tmp_path / "run" / "gpumem", environment=pod.environment(), ready="/-/healthy")
    ) as exporter:
        assert exporter.socket.is_socket()
