"""The webhook in the Helm chart: objects that fit each other, selectors, and certificates that upgrades keep."""

from __future__ import annotations

import base64
import copy
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.x509.verification import PolicyBuilder, Store

from gpumem_exporter.features.webhook import admitted_pods, webhook_server
from gpumem_exporter.features.webhook.webhook_command import webhook
from tests.support.servers.helm import Cluster, Objects, running_cluster

helm = pytest.importorskip("helm_sdkpy", reason="Helm's engine is not installed")
pytestmark = pytest.mark.tools

NAME = "gpumem-exporter-webhook"
HOST = f"{NAME}.gpumem.svc"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster() as running:
        yield running


def install(cluster: Cluster, webhook: dict[str, Any], **values: Any) -> Objects:
    return cluster.objects({**values, "webhook": {"enabled": True, **webhook}})


@pytest.fixture(scope="module")
def objects(cluster: Cluster) -> Objects:
    return install(cluster, {}, networkPolicy={"enabled": True})


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether a label selector of Kubernetes matches."""
    for each in selector.get("matchExpressions", ()):
        value, values = labels.get(each["key"]), each.get("values")
        matched = {
            "In": value is not None and value in (values or ()),
            "NotIn": value not in (values or ()),
            "Exists": value is not None,
            "DoesNotExist": value is None,
        }
        if not matched[each["operator"]]:
            return False
    return bool(selector.get("matchLabels", {}).items() <= labels.items())


def test_the_objects_of_the_webhook_select_its_pods_and_the_objects_of_the_exporter_do_not(objects: Objects) -> None:
    template = objects["Deployment", NAME]["spec"]["template"]
    labels = template["metadata"]["labels"]
    for kind, place in (
        ("Deployment", "selector"),
        ("PodDisruptionBudget", "selector"),
        ("NetworkPolicy", "podSelector"),
    ):
        assert selects(objects[kind, NAME]["spec"][place], labels)
        assert (
            kind == "PodDisruptionBudget"
            or kind == "Deployment"
            or not selects(objects[kind, "gpumem-exporter"]["spec"][place], labels)
        )
    assert objects["Service", NAME]["spec"]["selector"].items() <= labels.items()
    assert not objects["Service", "gpumem-exporter"]["spec"]["selector"].items() <= labels.items()
    assert not selects(objects["DaemonSet", "gpumem-exporter"]["spec"]["selector"], labels)


def test_the_network_policy_opens_the_port_of_the_webhook_to_the_given_peers_only(
    cluster: Cluster, objects: Objects
) -> None:
    (container,) = objects["Deployment", NAME]["spec"]["template"]["spec"]["containers"]
    ports = [{"port": port["name"]} for port in container["ports"]]
    peers = [{"ipBlock": {"cidr": "10.0.0.0/28"}}]
    restricted = install(cluster, {}, networkPolicy={"enabled": True, "webhookFrom": peers})
    for found, ingress in ((objects, [{"ports": ports}]), (restricted, [{"ports": ports, "from": peers}])):
        policy = found["NetworkPolicy", NAME]["spec"]
        assert (policy["policyTypes"], policy["ingress"], policy["egress"]) == (["Ingress", "Egress"], ingress, [])
    assert ("NetworkPolicy", NAME) not in install(cluster, {})


def test_the_pod_runs_the_command_with_valid_options_and_meets_the_restricted_standard(objects: Objects) -> None:
    pod = objects["Deployment", NAME]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    name, *options = container["args"]
    # A copy: a command keeps the help option that it has in its first context, and this one has no application.
    with copy.copy(webhook).make_context(name, options) as context:
        port = context.params["address"]
        files = {str(context.params[key]) for key in ("certificate_file", "key_file")}
    assert (name, port) == ("webhook", f":{container['ports'][0]['containerPort']}")
    (mount,), (volume,) = container["volumeMounts"], pod["volumes"]
    assert files == {f"{mount['mountPath']}/{item['path']}" for item in volume["secret"]["items"]}
    assert ("Secret", volume["secret"]["secretName"]) in objects
    assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert (
        pod["automountServiceAccountToken"] is objects["ServiceAccount", NAME]["automountServiceAccountToken"] is False
    )
    service = objects["Service", NAME]["spec"]["ports"]
    assert [port["targetPort"] for port in service] == [port["name"] for port in container["ports"]]


# --- The configuration


def entries(objects: Objects) -> list[dict[str, Any]]:
    return list(objects["MutatingWebhookConfiguration", f"{NAME}.gpumem"]["webhooks"])


@pytest.mark.parametrize(
    ("namespace", "pod", "route"),
    [
        ({}, {}, None),
        ({}, {"gpumem.io/inject": "true"}, webhook_server.PODS),
        ({"gpumem.io/inject": "false"}, {"gpumem.io/inject": "true"}, webhook_server.PODS),
        ({"gpumem.io/inject": "true"}, {}, webhook_server.PODS),
        ({"gpumem.io/inject": "true"}, {"gpumem.io/inject": "true"}, webhook_server.PODS),
        ({"gpumem.io/inject": "true"}, {"gpumem.io/inject": "false"}, None),
        ({"gpumem.io/inject": "true"}, {"gpumem.io/inject": "no"}, None),
        ({"pod-security.kubernetes.io/enforce": "privileged"}, {"gpumem.io/inject": "true"}, webhook_server.PODS),
        (
            {"pod-security.kubernetes.io/enforce": "baseline"},
            {"gpumem.io/inject": "true"},
            webhook_server.PODS_WITHOUT_HOST_PATH,
        ),
        (
            {"pod-security.kubernetes.io/enforce": "restricted", "gpumem.io/inject": "true"},
            {},
            webhook_server.PODS_WITHOUT_HOST_PATH,
        ),
        ({"kubernetes.io/metadata.name": "kube-system"}, {"gpumem.io/inject": "true"}, None),
        ({"kubernetes.io/metadata.name": "gpumem", "gpumem.io/inject": "true"}, {}, None),
    ],
)
def test_a_pod_is_reviewed_at_most_once_by_its_label_or_that_of_its_namespace(
    objects: Objects, namespace: dict[str, str], pod: dict[str, str], route: str | None
) -> None:
    namespace = {"kubernetes.io/metadata.name": "team-a", **namespace}
    called = [
        entry["clientConfig"]["service"]["path"]
        for entry in entries(objects)
        if selects(entry["namespaceSelector"], namespace) and selects(entry["objectSelector"], pod)
    ]
    assert called == ([route] if route else [])
    assert all(admitted_pods.LABEL in str(entry["objectSelector"]) for entry in entries(objects))


def test_a_failing_webhook_prevents_no_pod(objects: Objects) -> None:
    for entry in entries(objects):
        assert (entry["failurePolicy"], entry["sideEffects"]) == ("Ignore", "None")
        assert (entry["reinvocationPolicy"], entry["timeoutSeconds"]) == ("IfNeeded", 3)
        (rule,) = entry["rules"]
        assert (rule["operations"], rule["resources"]) == (["CREATE"], ["pods"])


def test_more_conditions_on_namespaces_apply_to_every_review(cluster: Cluster) -> None:
    extra = {"key": "team", "operator": "In", "values": ["ml"]}
    for entry in entries(install(cluster, {"namespaces": [extra]})):
        assert extra in entry["namespaceSelector"]["matchExpressions"]


def test_without_the_folder_of_the_host_the_chart_refuses_the_webhook(cluster: Cluster) -> None:
    with pytest.raises(helm.InstallError, match=r"socket\.hostPath"):
        install(cluster, {}, socket={"hostPath": ""})


# --- Certificates


def test_the_certificate_of_the_chart_is_valid_for_the_service_and_its_authority_is_trusted(
    objects: Objects, tmp_path: Path
) -> None:
    data = {name: base64.b64decode(text) for name, text in objects["Secret", f"{NAME}-tls"]["data"].items()}
    for name, content in data.items():
        (tmp_path / name).write_bytes(content)
    # Raises if the key and the certificate do not belong together.
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")
    certificate = x509.load_pem_x509_certificate(data["tls.crt"])
    for entry in entries(objects):
        bundle = base64.b64decode(entry["clientConfig"]["caBundle"])
        assert (entry["clientConfig"]["service"]["name"], entry["clientConfig"]["service"]["namespace"]) == (
            NAME,
            "gpumem",
        )
        verifier = PolicyBuilder().store(Store(x509.load_pem_x509_certificates(bundle)))
        verifier.build_server_verifier(x509.DNSName(HOST)).verify(certificate, [])
    assert (certificate.not_valid_after_utc - certificate.not_valid_before_utc).days > 3000


def test_an_upgrade_keeps_the_certificate(cluster: Cluster, objects: Objects) -> None:
    secret = copy.deepcopy(objects["Secret", f"{NAME}-tls"])
    release = {"meta.helm.sh/release-name": "gpumem-exporter", "meta.helm.sh/release-namespace": "gpumem"}
    secret["metadata"]["annotations"] = release
    bundles = {entry["clientConfig"]["caBundle"] for entry in entries(objects)}
    cluster.secrets[f"{NAME}-tls"] = secret
    try:
        upgraded = install(cluster, {"replicas": 4})
        kept = secret["data"].pop("ca.crt")
        damaged = install(cluster, {})
    finally:
        del cluster.secrets[f"{NAME}-tls"]
    assert upgraded["Secret", f"{NAME}-tls"]["data"] == {**secret["data"], "ca.crt": kept}
    assert {entry["clientConfig"]["caBundle"] for entry in entries(upgraded)} == bundles
    assert damaged["Secret", f"{NAME}-tls"]["data"]["tls.crt"] != secret["data"]["tls.crt"]


def test_the_certificate_of_cert_manager_comes_from_an_authority_that_stays(cluster: Cluster) -> None:
    found = install(cluster, {"certManager": {"enabled": True}})
    serving, authority = found["Certificate", NAME]["spec"], found["Certificate", f"{NAME}-authority"]["spec"]
    mounted = found["Deployment", NAME]["spec"]["template"]["spec"]["volumes"][0]["secret"]["secretName"]
    assert (serving["secretName"], serving["dnsNames"]) == (mounted, [HOST])
    assert found["Issuer", serving["issuerRef"]["name"]]["spec"] == {"ca": {"secretName": authority["secretName"]}}
    assert found["Issuer", authority["issuerRef"]["name"]]["spec"] == {"selfSigned": {}}
    assert authority["isCA"]
    configuration = found["MutatingWebhookConfiguration", f"{NAME}.gpumem"]
    assert configuration["metadata"]["annotations"] == {"cert-manager.io/inject-ca-from": f"gpumem/{NAME}"}
    assert not any("caBundle" in entry["clientConfig"] for entry in configuration["webhooks"])
    assert ("Secret", mounted) not in found


def test_an_issuer_of_the_cluster_replaces_the_authority(cluster: Cluster) -> None:
    issuer = {"kind": "ClusterIssuer", "name": "internal"}
    found = install(cluster, {"certManager": {"enabled": True, "issuerRef": issuer}})
    assert found["Certificate", NAME]["spec"]["issuerRef"] == issuer
    assert [key for key in found if key[0] in ("Issuer", "Certificate")] == [("Certificate", NAME)]
