"""Helm's own engine, which renders the chart by installing it into a cluster that is only an HTTP server.

The engine has no `helm template`, and an installation does more: it checks the values against the schema, sorts the
objects, and stores the release.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

import yaml

from tests.support.paths import REPOSITORY
from tests.support.servers.http_servers import serving

CHART = REPOSITORY / "deploy" / "helm" / "gpumem-exporter"
Objects = dict[tuple[str, str], dict[str, Any]]
"""Objects by kind and name."""

_MAX_SECRET_BYTES = 1 << 20
"""The limit of Kubernetes. Helm stores a release, with the chart, in one Secret."""
_KINDS = {
    "v1": ("ConfigMap", "Pod", "Secret", "Service", "ServiceAccount"),
    "admissionregistration.k8s.io/v1": ("MutatingWebhookConfiguration",),
    "apps/v1": ("DaemonSet", "Deployment"),
    "cert-manager.io/v1": ("Certificate", "Issuer"),
    "networking.k8s.io/v1": ("NetworkPolicy",),
    "monitoring.coreos.com/v1": ("PodMonitor", "PrometheusRule", "ServiceMonitor"),
    "policy/v1": ("PodDisruptionBudget",),
}
_OF_NO_NAMESPACE = ("MutatingWebhookConfiguration",)


class Cluster:
    """An API server without objects, on which Helm installs releases."""

    def __init__(self, address: str) -> None:
        user = {"name": "user", "user": {}}
        cluster = {"name": "fake", "cluster": {"server": address}}
        context = {"name": "context", "context": {"cluster": "fake", "user": "user"}}
        self._kubeconfig = yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [cluster],
                "users": [user],
                "contexts": [context],
                "current-context": "context",
            }
        )
        self.stored = b""
        """The request that stored the latest release."""
        self.secrets: dict[str, Mapping[str, Any]] = {}
        """Secrets that exist before an installation, by name, for the function `lookup` of charts."""

    def install(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Install the chart and return the release as Helm stores it; raises helm_sdkpy.InstallError."""
        import helm_sdkpy

        configuration = helm_sdkpy.Configuration(namespace="gpumem", kubeconfig=self._kubeconfig)
        install = helm_sdkpy.Install(configuration)
        asyncio.run(install.run("gpumem-exporter", str(CHART), values=dict(values), wait=False))
        assert len(self.stored) < _MAX_SECRET_BYTES // 2
        # The Secret is in protobuf; its value is base64 of gzip of JSON.
        (packed,) = re.findall(rb"H4sI[\w+/]+=*", self.stored)
        return dict(json.loads(gzip.decompress(base64.b64decode(packed))))

    def objects(self, values: Mapping[str, Any]) -> Objects:
        """Install the chart, and return its objects and the pods of `helm test`.

        Without dashboards, whose rendering takes most of the time, unless the values have some.
        """
        release = self.install({"dashboards": {"enabled": False}, **values})
        texts = [release["manifest"], *(hook["manifest"] for hook in release.get("hooks", ()))]
        found = [document for text in texts for document in yaml.load_all(text, yaml.CSafeLoader) if document]
        objects = {(document["kind"], document["metadata"]["name"]): document for document in found}
        assert len(objects) == len(found)
        return objects


@contextmanager
def running_cluster() -> Iterator[Cluster]:
    """Run the API server on a free port."""
    with serving(_Requests) as server:
        cluster = server.cluster = Cluster(f"http://127.0.0.1:{server.server_port}")  # type: ignore[attr-defined]
        yield cluster


class _Requests(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].rstrip("/")
        answers = _discovery()
        if path in answers:
            self._answer(200, answers[path])
        elif path.endswith("/secrets"):
            self._answer(200, {"apiVersion": "v1", "kind": "SecretList", "metadata": {}, "items": []})
        elif secret := self.server.cluster.secrets.get(path.partition("/secrets/")[2]):  # type: ignore[attr-defined]
            self._answer(200, secret)
        else:
            self._answer(404, {"apiVersion": "v1", "kind": "Status", "status": "Failure", "reason": "NotFound"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.partition("?")[0].endswith("/secrets") and b"helm.sh/release.v1" in body:
            self.server.cluster.stored = body  # type: ignore[attr-defined]
        created = json.loads(body) if body.startswith(b"{") else {"apiVersion": "v1", "kind": "Secret", "metadata": {}}
        self._answer(201, created)

    def do_PUT(self) -> None:
        self.do_POST()

    def do_PATCH(self) -> None:
        changes = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        secrets = self.server.cluster.secrets  # type: ignore[attr-defined]
        self._answer(200, {**secrets[self.path.partition("?")[0].rpartition("/")[2]], **changes})

    def _answer(self, status: int, document: Mapping[str, Any]) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _discovery() -> dict[str, Mapping[str, Any]]:
    groups = []
    answers: dict[str, Mapping[str, Any]] = {
        "/version": {"major": "1", "minor": "33", "gitVersion": "v1.33.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
    }
    for group_version, kinds in _KINDS.items():
        resources = [
            {
                "name": _plural(kind),
                "namespaced": kind not in _OF_NO_NAMESPACE,
                "kind": kind,
                "verbs": ["get", "list", "create"],
            }
            for kind in kinds
        ]
        root = "/api/" if group_version == "v1" else "/apis/"
        answers[root + group_version] = {
            "kind": "APIResourceList",
            "apiVersion": "v1",
            "groupVersion": group_version,
            "resources": resources,
        }
        if "/" in group_version:
            group, version = group_version.split("/")
            served = {"groupVersion": group_version, "version": version}
            groups.append({"name": group, "versions": [served], "preferredVersion": served})
    answers["/apis"] = {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    return answers


def _plural(kind: str) -> str:
    return kind.lower()[:-1] + "ies" if kind.endswith("y") else kind.lower() + "s"
