"""`--kube`: reach the exporter of a node of Kubernetes through `kubectl port-forward`.

kubectl's own configuration selects the cluster and the user. Kubernetes requires the rights to list pods and to create
`pods/portforward` in the exporter's namespace.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from gpumem_client.wire.errors import ConfigurationError, ExporterUnreachableError
from gpumem_exporter.cli.program import one_line

SCHEME = "kube://"
"""Of the URL of an exporter by its node or pod: `kube://gpu-node-7`."""
MAX_FORWARDS = 64
"""The number of exporters that are reached at a time: each needs a process of kubectl, of some 50 MiB."""

_LIST_SECONDS = 20.0
_START_SECONDS = 30.0
_END_SECONDS = 2.0
_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 10.0
_SHOWN_NODES = 8
_DEFAULT_PORT = 9844
_VARIABLES = ("KUBECTL", "KUBE_NAMESPACE", "KUBE_SELECTOR")
_PR_SET_PDEATHSIG = 1
_FORWARDING = re.compile(r"Forwarding from 127\.0\.0\.1:(\d+) -> ")
_KLOG = re.compile(r"[EWIF]\d{4} [\d:.]+ +\d+ [^]]+\] ")


@dataclass(frozen=True, slots=True)
class ExporterPod:
    """A pod with an exporter."""

    name: str
    node: str
    port: int
    tls: bool = False
    objection: str = ""
    """Why its port cannot be forwarded; empty if the pod runs."""

    @classmethod
    def of(cls, pod: Mapping[str, Any]) -> ExporterPod:
        """Return the pod of an object of Kubernetes' API."""
        spec, status = pod.get("spec", {}), pod.get("status", {})
        containers = [*spec.get("containers", ()), *spec.get("initContainers", ())]
        ports = [
            port for container in containers for port in container.get("ports", ()) if port.get("name") == "metrics"
        ]
        schemes = [
            probe.get("httpGet", {}).get("scheme")
            for container in containers
            for name in ("startupProbe", "livenessProbe", "readinessProbe")
            if (probe := container.get(name))
        ]
        schemes.append(pod["metadata"].get("annotations", {}).get("prometheus.io/scheme", "").upper())
        return cls(
            pod["metadata"]["name"],
            spec.get("nodeName", ""),
            ports[0]["containerPort"] if ports else _DEFAULT_PORT,
            tls="HTTPS" in schemes,
            objection=_objection(pod, status),
        )


def _objection(pod: Mapping[str, Any], status: Mapping[str, Any]) -> str:
    if pod["metadata"].get("deletionTimestamp"):
        return "it is being deleted"
    for container in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
        if reason := container.get("state", {}).get("waiting", {}).get("reason"):
            return f"its container {container['name']!r} waits: {reason}"
    phase = status.get("phase", "Unknown")
    return "" if phase == "Running" else f"its phase is {phase}"


@dataclass(frozen=True, slots=True)
class Kubectl:
    """The program kubectl, and where it finds exporters."""

    command: tuple[str, ...] = ("kubectl",)
    namespace: str = "gpumem"
    selector: str = "app.kubernetes.io/name=gpumem-exporter"

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Kubectl:
        """Return what the environment sets."""
        command, *given = (environ.get(f"GPUMEM_{name}", "").strip() for name in _VARIABLES)
        default = cls()
        try:
            words = tuple(shlex.split(command)) or default.command
        except ValueError as error:
            raise ConfigurationError(f"GPUMEM_KUBECTL {command!r}: {error}") from None
        return cls(words, given[0] or default.namespace, given[1] or default.selector)

    def pods(self) -> list[ExporterPod]:
        """List the exporters' pods.

        Raises ConfigurationError if there is no kubectl, and ExporterUnreachableError with kubectl's reason.
        """
        words = ("get", "pods", "--namespace", self.namespace, "--selector", self.selector, "--output", "json")
        try:
            listed = subprocess.run(  # noqa: S603 - the user's own command
                [*self.command, *words, f"--request-timeout={_LIST_SECONDS / 2:g}s"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_LIST_SECONDS,
                check=False,
            )
        except OSError as error:
            raise self.missing(error) from None
        except subprocess.TimeoutExpired:
            raise ExporterUnreachableError(f"kubectl did not list pods within {_LIST_SECONDS:g} s") from None
        if listed.returncode != 0:
            lines = listed.stderr.strip().splitlines() or [f"exit code {listed.returncode}"]
            raise ExporterUnreachableError(f"kubectl: {_reason(lines[-1])}")
        try:
            return [ExporterPod.of(pod) for pod in json.loads(listed.stdout)["items"]]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ExporterUnreachableError("kubectl printed no list of pods") from None

    def find(self, target: str, pods: Sequence[ExporterPod]) -> ExporterPod:
        """Return the running pod with this name or on this node; raises ExporterUnreachableError if there is none."""
        found = sorted((pod for pod in pods if target in (pod.name, pod.node)), key=lambda pod: bool(pod.objection))
        where = f"in the namespace {self.namespace!r} with the label {self.selector}"
        if not pods:
            raise ExporterUnreachableError(f"no pod {where}: set GPUMEM_KUBE_NAMESPACE and GPUMEM_KUBE_SELECTOR")
        if not found:
            nodes = sorted({pod.node for pod in pods} - {""})
            close = get_close_matches(target, [*nodes, *(pod.name for pod in pods)], n=1)
            listed = ", ".join([*nodes[:_SHOWN_NODES], *(["…"] if len(nodes) > _SHOWN_NODES else ())])
            hint = f"did you mean {close[0]!r}?" if close else f"the nodes are {listed}"
            raise ExporterUnreachableError(f"no node or pod {target!r} {where}; {hint}")
        if found[0].objection:
            raise ExporterUnreachableError(
                f"the pod {found[0].name} on {found[0].node or 'no node'}: {found[0].objection}"
            )
        return found[0]

    def missing(self, error: OSError) -> ConfigurationError:
        """Return the error of a program that does not start."""
        return ConfigurationError(
            f"cannot run {self.command[0]!r}: {error.strerror}; install kubectl, or set GPUMEM_KUBECTL to its command"
        )


class Forward:
    """A port of this machine that leads to the exporter of a node, from `start` until `close`."""

    def __init__(self, kubectl: Kubectl, target: str, pods: Sequence[ExporterPod] | None = None) -> None:
        self.failure = ""
        """Why the port does not lead to the exporter; empty while it does."""
        self._kubectl, self._target, self._pods = kubectl, target, pods
        self._port, self._tls = 0, False
        self._pause_seconds = _FIRST_PAUSE_SECONDS
        self._error: ExporterUnreachableError | ConfigurationError | None = None
        self._process: subprocess.Popen[str] | None = None
        self._started, self._closed = threading.Event(), threading.Event()
        # Linux ends a child with the thread that started it, so the thread must live as long as the child.
        self._thread = threading.Thread(target=self._run, name="gpumem-kubectl", daemon=True)

    def start(self) -> None:
        """Start kubectl, unless it was started."""
        if self._thread.ident is None:
            self._thread.start()

    @property
    def url(self) -> str:
        """The URL on this machine; waits for the first connection. Raises the errors of `Kubectl.pods` and `find`."""
        self.start()
        if not self._started.wait(_START_SECONDS):
            self.close()
            raise ExporterUnreachableError(
                f"`kubectl port-forward` to {self._target} did not start within {_START_SECONDS:g} s"
            )
        if self._error is not None:
            raise self._error
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self._port}"

    @property
    def ended(self) -> bool:
        """Whether the port never led to the exporter, or was closed."""
        return self._error is not None or self._closed.is_set()

    def end(self) -> None:
        """Let kubectl end, without waiting for it."""
        self._closed.set()
        self._signal(signal.SIGTERM)

    def close(self) -> None:
        """End kubectl."""
        self.end()
        if self._thread.ident is None:
            return
        self._thread.join(_END_SECONDS)
        self._signal(signal.SIGKILL)
        self._thread.join(_END_SECONDS)

    def _signal(self, number: int) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, number)  # a wrapper such as `sh -c` has kubectl as its child

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                pod = self._kubectl.find(self._target, self._kubectl.pods() if self._pods is None else self._pods)
                self._pods = None  # they may be other pods the next time
                self._forward(pod)
            except (ConfigurationError, ExporterUnreachableError) as error:
                if self._started.is_set():
                    self.failure = str(error)
                else:
                    self._error = error
            except BaseException as error:  # noqa: BLE001 - `url` would wait for ever
                self._error = ExporterUnreachableError(f"kubectl port-forward: {error!r}")
            if self._error is not None:
                self._started.set()
                return
            # kubectl has ended, because the pod was replaced or the connection was lost. It is started again for the
            # pod that the node has by then, with the same local port.
            self._closed.wait(self._pause_seconds * random.uniform(0.8, 1.2))  # noqa: S311 - jitter
            self._pause_seconds = min(2 * self._pause_seconds, _LONGEST_PAUSE_SECONDS)

    def _forward(self, pod: ExporterPod) -> None:
        """Run kubectl until it ends, then raise ExporterUnreachableError with its last line."""
        place = ("--namespace", self._kubectl.namespace, "--address", "127.0.0.1")
        ports = f"{self._port or ''}:{pod.port}"
        try:
            process = subprocess.Popen(  # noqa: S603 - the user's own command
                [*self._kubectl.command, "port-forward", *place, f"pod/{pod.name}", ports],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C is for the command, which ends kubectl afterwards
                preexec_fn=_die_with_thread(),
            )
        except OSError as error:
            raise self._kubectl.missing(error) from None
        self._process = process
        # `end` sets the flag, then signals the process. Here the process is set, then the flag is read: one of the two
        # signals it.
        if self._closed.is_set():
            self._signal(signal.SIGTERM)
        last = ""
        with process:
            for line in process.stdout or ():  # kubectl would wait for a reader of its output
                if found := _FORWARDING.match(line):
                    self._port, self._tls, self.failure = int(found[1]), pod.tls, ""
                    self._pause_seconds = _FIRST_PAUSE_SECONDS
                    self._started.set()
                elif line.strip() and not line.startswith("Handling connection"):
                    last = _reason(line)
        raise ExporterUnreachableError(f"kubectl port-forward ended: {last or f'exit code {process.returncode}'}")


class Forwards:
    """The forwarded ports of a command. `open` and `url` are for one thread at a time."""

    def __init__(self) -> None:
        self._by_target: dict[str, Forward] = {}

    def open(self, targets: Iterable[str]) -> None:
        """Start to forward ports to exporters that have none."""
        wanted = set(targets)
        for target in self._by_target.keys() - wanted:
            self._by_target.pop(target).close()
        if len(wanted) > MAX_FORWARDS:
            raise ConfigurationError(
                f"--instance-url {SCHEME}: {len(wanted)} exporters, more than {MAX_FORWARDS} ports that are forwarded; "
                "select fewer with --query, or open a port of the nodes (hostPort) and use http://{instance}:9844"
            )
        missing = [each for each in wanted if each not in self._by_target or self._by_target[each].ended]
        if missing:
            kubectl = Kubectl.from_environment()
            pods = kubectl.pods()
            self._by_target |= {target: Forward(kubectl, target, pods) for target in missing}
            for target in missing:
                self._by_target[target].start()

    def url(self, target: str) -> str:
        """Return the URL on this machine for a target of `open`. Raises the errors of `Forward.url`."""
        return self._by_target[target].url

    def close(self) -> None:
        """End every kubectl."""
        # All at once: each may take seconds to end.
        for forward in self._by_target.values():
            forward.end()
        for forward in self._by_target.values():
            forward.close()
        self._by_target = {}


def _die_with_thread() -> Callable[[], None] | None:
    """Return what lets a child end together with the thread that starts it, also if SIGKILL ends this process."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _reason(line: str) -> str:
    return one_line(_KLOG.sub("", line.strip())).removeprefix("error: ")
