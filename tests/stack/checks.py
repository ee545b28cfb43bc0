"""Checks of the containers that docker-compose.yml and the Kubernetes manifest describe.

run.sh runs it in new network and mount namespaces, with the folder of podman's store. It needs no packages. Each check
is one sentence, which is printed with its values. The first failure ends the run and prints the containers'
logs.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = float(os.environ.get("GPUMEM_PATIENCE") or "1")
"""A factor for all limits, for slow machines, as in tests/support/waiting.py."""
WAIT_SECONDS = 60.0 * PATIENCE
ALERT_SECONDS = 600.0 * PATIENCE
"""The demo is scraped every 15 s, its rules are evaluated every 15 s, and Alertmanager groups alerts."""
STOP_SECONDS = 2.0 * PATIENCE
EXPORTER, PROMETHEUS, ALERTMANAGER = 9844, 9090, 9093
GET = """
import http.client, sys
connection = http.client.HTTPConnection("127.0.0.1", 9844, timeout=10)
connection.request("GET", sys.argv[1])
answer = connection.getresponse()
sys.stdout.write(answer.read().decode())
sys.exit(answer.status != 200)
"""
POD = """
import sys, yaml
(agent,) = [d for d in yaml.safe_load_all(sys.stdin) if d["kind"] == "DaemonSet"]
template = agent["spec"]["template"]
for volume in template["spec"]["volumes"]:
    volume["hostPath"]["path"] = sys.argv[1] + volume["hostPath"]["path"]
template["metadata"]["name"] = "daemonset"
yaml.safe_dump({"apiVersion": "v1", "kind": "Pod", **template}, sys.stdout)
"""


class Stack:
    """podman and docker-compose on the store of run.sh, and the containers."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self._podman = str(work / "podman")
        self._ended = threading.Event()

    def podman(self, *words: str, stdin: str = "") -> str:
        """Run podman and return its output; raises AssertionError with its errors."""
        return _run(self._podman, *words, stdin=stdin)

    def compose(self, *words: str) -> str:
        """Run docker-compose on podman's API and return its output."""
        return _run(str(self.work / "docker-compose"), *words)

    def inspect(self, container: str) -> dict[str, Any]:
        """Return podman's description of a container."""
        (found,) = json.loads(self.podman("container", "inspect", container))
        return dict(found)

    def inside(self, container: str, *words: str) -> str:
        """Run a command in a container as its user and return the output."""
        return self.podman("exec", container, *words)

    def asked_inside(self, container: str, path: str) -> Any:
        """Return the exporter's answer over its loopback, which events require."""
        return json.loads(self.inside(container, "python", "-c", GET, path))

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run podman's API, and the health checks, which systemd would run."""
        with (self.work / "service.log").open("ab") as log:
            address = f"unix://{self.work / 'podman.sock'}"
            service = subprocess.Popen(
                [self._podman, "system", "service", "--time", "0", address], stdout=log, stderr=log
            )
        timer = threading.Thread(target=self._check_health, daemon=True)
        timer.start()
        try:
            wait_for("podman's API", lambda: self.compose("ls") is not None)
            yield
        finally:
            self._ended.set()
            timer.join()
            # Containers with a restart policy must be removed before podman stops.
            subprocess.run([self._podman, "pod", "rm", "--all", "--force"], capture_output=True, check=False)
            subprocess.run([self._podman, "rm", "--all", "--force", "--time", "1"], capture_output=True, check=False)
            service.terminate()
            service.wait(10)

    def _check_health(self) -> None:
        while not self._ended.wait(1.0):
            listed = subprocess.run([self._podman, "ps", "--quiet"], capture_output=True, text=True, check=False)
            for container in listed.stdout.split():
                subprocess.run([self._podman, "healthcheck", "run", container], capture_output=True, check=False)

    def print_logs(self) -> None:
        """Print the last lines of every container's log."""
        for name in self.podman("ps", "--all", "--format", "{{.Names}}").split():
            print(f"--- {name}", file=sys.stderr)
            subprocess.run([self._podman, "logs", "--tail", "20", name], stdout=sys.stderr, check=False)


def check_start(stack: Stack) -> str:
    """all services except Grafana start in the order of their conditions and become healthy"""
    began = time.monotonic()
    stack.compose("--profile", "demo", "up", "--detach", "--no-build", "demo", "prometheus", "alertmanager")
    for service in ("demo", "alertmanager", "prometheus"):
        container = f"gpumem-{service}-1"
        wait_for(f"{service} to be healthy", partial(_is_healthy, stack, container))
    return f"{time.monotonic() - began:.1f} s"


def check_confinement(stack: Stack) -> str:
    """no container runs as root, writes to its root file system, has a capability or can gain one"""
    for service in ("demo", "prometheus", "alertmanager"):
        name = f"gpumem-{service}-1"
        status = dict(
            line.split(":\t", 1) for line in stack.inside(name, "cat", "/proc/1/status").splitlines() if ":\t" in line
        )
        assert status["Uid"].split()[0] != "0", (service, status["Uid"])
        for capabilities in ("CapPrm", "CapEff", "CapBnd", "CapAmb"):
            assert int(status[capabilities], 16) == 0, (service, capabilities)
        assert status["NoNewPrivs"] == "1", service
        found = stack.inspect(name)
        assert found["HostConfig"]["ReadonlyRootfs"] is True, service
        assert found["HostConfig"]["Memory"] > 0, service
        root = next(line for line in stack.inside(name, "cat", "/proc/1/mounts").splitlines() if line.split()[1] == "/")
        assert root.split()[3].split(",")[0] == "ro", root
    uid = stack.inside("gpumem-demo-1", "id", "-u").strip()
    assert uid == "65532", uid
    return f"the exporter is uid {uid}"


def check_prometheus(stack: Stack) -> str:
    """Prometheus scrapes the exporter by its service name, has loaded every rule and has the Alertmanager"""

    def targets() -> dict[str, str]:
        active = get_json(PROMETHEUS, "/api/v1/targets")["data"]["activeTargets"]
        return {target["labels"]["job"]: target["health"] for target in active}

    wait_for("the exporter to be scraped", lambda: targets().get("gpumem") == "up")
    wait_for("all targets to be up", lambda: set(targets().values()) == {"up"})
    answer = get_json(PROMETHEUS, "/api/v1/query?query=count(gpumem_ledger_bytes)")["data"]["result"]
    assert int(answer[0]["value"][1]) > 0, answer

    def rules() -> list[dict[str, Any]]:
        return [rule for group in get_json(PROMETHEUS, "/api/v1/rules")["data"]["groups"] for rule in group["rules"]]

    files = sorted((ROOT / "deploy" / "prometheus" / "rules").glob("*.yml"))
    assert files
    loaded = {group["file"] for group in get_json(PROMETHEUS, "/api/v1/rules")["data"]["groups"]}
    assert loaded == {f"/etc/prometheus/rules/{path.name}" for path in files}, loaded
    wait_for("every rule to be evaluated without an error", lambda: all(rule["health"] == "ok" for rule in rules()))
    wait_for(
        "the Alertmanager to be known",
        lambda: get_json(PROMETHEUS, "/api/v1/alertmanagers")["data"]["activeAlertmanagers"],
    )
    (known,) = get_json(PROMETHEUS, "/api/v1/alertmanagers")["data"]["activeAlertmanagers"]
    assert known["url"].startswith("http://alertmanager:9093/"), known
    return f"{len(rules())} rules of {len(files)} files, {known['url']}"


def check_alert(stack: Stack) -> str:
    """the idle cache of the demo's notebook is an alert in Alertmanager with a link to the published Prometheus"""
    path = "/api/v2/alerts?filter=alertname%3DGpuMemReclaimableHoarded"
    wait_for("the alert", lambda: json.loads(get(ALERTMANAGER, path)), ALERT_SECONDS)
    alert = json.loads(get(ALERTMANAGER, path))[0]
    assert alert["generatorURL"].startswith(f"http://localhost:{PROMETHEUS}/graph?"), alert
    return str(alert["annotations"]["summary"])


def check_actions(stack: Stack) -> str:
    """an action is refused through the published port, with the flag that allows it, and accepted in the container"""
    body = json.dumps({"action": "empty_cache", "target": {"all": True}, "dry_run": True})
    connection = http.client.HTTPConnection("127.0.0.1", EXPORTER, timeout=10)
    try:
        connection.request("POST", "/api/v1/actions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        detail = json.loads(answer.read())["detail"]
    finally:
        connection.close()
    assert answer.status == 403, (answer.status, detail)
    assert "--action.token-file" in detail, detail
    action = json.loads(stack.inside("gpumem-demo-1", "gpumem-exporter", "clear", "--all", "--dry-run", "--json"))
    assert {result["outcome"] for result in action["results"]} == {"would_clear"}, action
    assert action["freed_bytes"] > 1 << 30, action
    return str(action["sentence"])


def check_events(stack: Stack) -> str:
    """events are in the volume after a restart of the container and in a new container"""
    name, path = "gpumem-demo-1", "/api/v1/events?after=0&limit=10"
    folder = stack.inside(name, "stat", "-c", "%u %a", "/var/lib/gpumem").strip()
    # The mode shows that the volume was copied from the image's folder. podman always gives it to the container's user.
    assert folder == "65532 700", folder
    wait_for("ten events", lambda: len(stack.asked_inside(name, path)["events"]) == 10)
    before = stack.asked_inside(name, path)["events"]
    stack.compose("--profile", "demo", "restart", "demo")
    wait_for("it to be healthy again", partial(_is_healthy, stack, name))
    assert stack.asked_inside(name, path)["events"] == before
    old = stack.inspect(name)["Id"]
    stack.compose("--profile", "demo", "up", "--detach", "--no-build", "--force-recreate", "--no-deps", "demo")
    assert stack.inspect(name)["Id"] != old
    wait_for("the new one to be healthy", partial(_is_healthy, stack, name))
    assert stack.asked_inside(name, path)["events"] == before
    newest = stack.asked_inside(name, "/api/v1/events?limit=1")["events"]
    assert newest[0]["id"] > before[-1]["id"]
    return f"ids {before[0]['id']} to {before[-1]['id']} twice again, after them {newest[0]['id']}"


def check_stop(stack: Stack) -> str:
    """SIGTERM ends the exporter, the container's first process, with status 0 within two seconds"""
    name = "gpumem-demo-1"
    began = time.monotonic()
    stack.podman("stop", "--time", "20", name)
    took = time.monotonic() - began
    state = stack.inspect(name)["State"]
    assert (state["Status"], state["ExitCode"]) == ("exited", 0), state
    assert took < STOP_SECONDS, took
    return f"{took:.2f} s"


def check_gpu_profile(stack: Stack) -> str:
    """without the profile the exporter runs in the host's PID namespace and is healthy without a driver"""
    stack.compose("--profile", "demo", "down", "--timeout", "5")
    # There is no device plugin for GPUs, so the reservation is removed.
    override = stack.work / "without-gpus.yml"
    override.write_text("services:\n  exporter:\n    deploy: !reset null\n")
    files = ("--file", "docker-compose.yml", "--file", str(override))
    stack.compose(*files, "up", "--detach", "--no-build", "exporter")
    name = "gpumem-exporter-1"
    wait_for("it to be healthy", partial(_is_healthy, stack, name))
    health = get_json(EXPORTER, "/health")
    assert (health["status"], health["source"], health["nvml"]["up"]) == ("degraded", "nvml", False), health
    namespace = stack.inside(name, "readlink", "/proc/self/ns/pid").strip()
    assert namespace == str(Path("/proc/self/ns/pid").readlink()), namespace
    stack.compose(*files, "down", "--timeout", "5")
    return str(health["nvml"]["error"])


def check_kubernetes(stack: Stack) -> str:
    """the DaemonSet's pod runs as root without a capability, with events in the host's folder, 0700"""
    image = "docker.io/library/gpumem-exporter:latest"
    manifest = (ROOT / "deploy" / "kubernetes" / "exporter.yaml").read_text()
    (tag,) = (line.split("image: ")[1].strip() for line in manifest.splitlines() if "image: " in line)
    stack.podman("tag", image, tag)
    host = stack.work / "host"
    host.mkdir()
    pod = stack.podman(
        "run", "--rm", "--interactive", "--network", "none", "--entrypoint", "python", image, "-c", POD, str(host),
        stdin=manifest,
    )  # fmt: skip
    for line in pod.splitlines():
        if line.strip().startswith("path: /") and str(host) in line:
            Path(line.split("path: ")[1]).mkdir(parents=True)
    (stack.work / "pod.yaml").write_text(pod)
    stack.podman("play", "kube", "--network", "podman", str(stack.work / "pod.yaml"))
    name = "daemonset-exporter"
    wait_for("the exporter in it to answer", lambda: stack.asked_inside(name, "/health")["checks"]["events"])
    health = stack.asked_inside(name, "/health")
    assert health["checks"]["events"]["status"] == "ok", health
    status = stack.inside(name, "cat", "/proc/1/status")
    for line in ("Uid:\t0\t0\t0\t0", "CapEff:\t0000000000000000", "CapBnd:\t0000000000000000"):
        assert line in status, status
    assert stack.inspect(name)["HostConfig"]["ReadonlyRootfs"] is True
    folder = host / "var/lib/gpumem/events"
    assert (folder.stat().st_uid, folder.stat().st_mode & 0o777) == (0, 0o700)
    assert (folder / "events.db").is_file()
    assert (host / "run/gpumem/exporter.sock").is_socket()
    return f"{health['checks']['events']['detail']} is the host's {folder.relative_to(host)}"


CHECKS: tuple[Callable[[Stack], str], ...] = (
    check_start,
    check_confinement,
    check_prometheus,
    check_alert,
    check_actions,
    check_events,
    check_stop,
    check_gpu_profile,
    check_kubernetes,
)


def wait_for(what: str, condition: Callable[[], Any], limit_seconds: float = WAIT_SECONDS) -> None:
    """Wait until a condition is true; an error of the condition counts as false."""
    deadline = time.monotonic() + limit_seconds
    failure: Exception | None = None
    while time.monotonic() < deadline:
        try:
            if condition():
                return
            failure = None
        except (AssertionError, OSError, ValueError, LookupError, http.client.HTTPException) as error:
            failure = error
        time.sleep(0.2)
    raise AssertionError(f"waited {limit_seconds:g} s for {what}: {failure or 'the condition is false'}")


def get(port: int, path: str) -> str:
    """Return the answer of a published port as text."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        text = answer.read().decode()
        assert answer.status == 200, (path, answer.status, text[:500])
        return text
    finally:
        connection.close()


def get_json(port: int, path: str) -> dict[str, Any]:
    """Return the answer of a published port as JSON."""
    return dict(json.loads(get(port, path)))


def _is_healthy(stack: Stack, container: str) -> bool:
    return _health(stack, container) == "healthy"


def _health(stack: Stack, container: str) -> str:
    return str(stack.inspect(container)["State"]["Health"]["Status"])


def _run(*words: str, stdin: str = "") -> str:
    limit = 180 * PATIENCE
    done = subprocess.run(words, cwd=ROOT, input=stdin, capture_output=True, text=True, check=False, timeout=limit)
    assert done.returncode == 0, f"{' '.join(words)}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def main() -> int:
    """Run every check; return 0 if all pass."""
    stack = Stack(Path(sys.argv[1]))
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    with stack.running():
        for check in CHECKS:
            sentence = " ".join((check.__doc__ or "").split())
            try:
                values = check(stack)
            except (AssertionError, LookupError, OSError, ValueError, subprocess.SubprocessError) as error:
                stack.print_logs()
                print(f"FAILED  {sentence}\n{error}", file=sys.stderr)
                return 1
            print(f"ok  {sentence}: {values}", flush=True)
    print(f"all {len(CHECKS)} checks passed; Grafana was not started, because no package has its image")
    return 0


if __name__ == "__main__":
    sys.exit(main())
