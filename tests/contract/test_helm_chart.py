"""The Helm chart, rendered by Helm's own engine: valid objects, equal to the plain manifests and the rules."""

from __future__ import annotations

import copy
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from gpumem_client.wire.errors import ConfigurationError
from gpumem_exporter.serve_command import load_settings
from gpumem_exporter.settings import environment_name
from tests.support.paths import REPOSITORY
from tests.support.servers.helm import CHART, Cluster, Objects, running_cluster

helm = pytest.importorskip("helm_sdkpy", reason="Helm's engine is not installed")
pytestmark = pytest.mark.tools

CI = sorted(path.stem.removesuffix("-values") for path in CHART.glob("ci/*-values.yaml"))
PLATFORMS = sorted(path.stem for path in CHART.glob("platforms/*.yaml"))
KUBERNETES = REPOSITORY / "deploy" / "kubernetes"
OPERATOR = json.loads((REPOSITORY / "tests" / "data" / "prometheus-operator.schema.json").read_text(encoding="utf-8"))

RULE = yaml.safe_load((REPOSITORY / "deploy" / "policy.example.yml").read_text(encoding="utf-8"))["rules"][0]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster() as running:
        yield running


@pytest.fixture(scope="module")
def releases(cluster: Cluster) -> dict[str, Objects]:
    """The objects of a release for each file of ci/ and platforms/, including the pods of `helm test`."""
    values = {name: read(CHART / "ci" / f"{name}-values.yaml") for name in CI}
    for name in ("default", "operator"):
        values[name] = {"dashboards": {}, **values[name]}
    values |= {name: read(CHART / "platforms" / f"{name}.yaml") for name in PLATFORMS}
    return {name: cluster.objects(given) for name, given in values.items()}


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def of_kind(objects: Objects, kind: str) -> dict[str, Any]:
    """Return the only object of a kind."""
    (found,) = (document for (kind_of_object, _), document in objects.items() if kind_of_object == kind)
    return found


def pod_of(objects: Objects) -> dict[str, Any]:
    return dict(of_kind(objects, "DaemonSet")["spec"]["template"]["spec"])


def exporter_of(objects: Objects) -> dict[str, Any]:
    """Return the container of the exporter."""
    return dict(next(each for each in pod_of(objects)["containers"] if each["name"] == "exporter"))


def without_instance(found: Any) -> Any:
    """Remove the label by which several releases in one namespace differ; the plain manifests do not have it."""
    changed = copy.deepcopy(found)
    for labels in (changed.get("labels"), changed.get("matchLabels")):
        if labels:
            assert labels.pop("app.kubernetes.io/instance") == "gpumem-exporter"
    return changed


# --- Every file of ci/ and platforms/


@pytest.mark.parametrize("name", [*CI, *PLATFORMS])
def test_every_object_is_valid(releases: dict[str, Objects], name: str) -> None:
    for document in releases[name].values():
        if document["apiVersion"] == "monitoring.coreos.com/v1":
            jsonschema.validate(document, OPERATOR)
        elif not document["apiVersion"].startswith("cert-manager.io/"):
            kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
        labels = document["metadata"]["labels"]
        assert labels["app.kubernetes.io/instance"] == "gpumem-exporter"
    pod = pod_of(releases[name])
    volumes = {volume["name"] for volume in pod["volumes"]}
    containers = (*pod.get("initContainers", ()), *pod["containers"])
    assert {mount["name"] for each in containers for mount in each.get("volumeMounts", ())} == volumes
    # Kubernetes itself checks these two.
    for security in (each.get("securityContext", {}) for each in containers):
        assert security.get("allowPrivilegeEscalation", True) or not security.get("privileged")
    exported = {port["name"]: port for port in exporter_of(releases[name])["ports"]}
    assert not pod.get("hostNetwork") or exported["metrics"].get("hostPort", 9844) == 9844


# --- The plain manifests


def test_the_default_pod_is_that_of_the_plain_manifest(releases: dict[str, Objects]) -> None:
    documents = yaml.safe_load_all((KUBERNETES / "exporter.yaml").read_text(encoding="utf-8"))
    (plain,) = (document for document in documents if document["kind"] == "DaemonSet")
    chart = of_kind(releases["default"], "DaemonSet")
    template = chart["spec"]["template"]
    assert without_instance(template["metadata"]) == plain["spec"]["template"]["metadata"]
    assert template["spec"] == plain["spec"]["template"]["spec"]
    assert without_instance(chart["spec"]["selector"]) == plain["spec"]["selector"]
    assert (chart["metadata"]["name"], chart["metadata"]["namespace"]) == ("gpumem-exporter", "gpumem")


def test_process_details_adds_the_capabilities_of_the_plain_component(releases: dict[str, Objects]) -> None:
    (patch,) = read(KUBERNETES / "process-details" / "kustomization.yaml")["patches"]
    (operation,) = yaml.safe_load(patch["patch"])
    container = exporter_of(releases["everything"])
    assert container["securityContext"]["capabilities"]["add"] == operation["value"]


def test_the_pod_monitors_are_those_of_the_plain_manifests(releases: dict[str, Objects]) -> None:
    sidecars = read(KUBERNETES / "prometheus-operator" / "podmonitor-sidecar.yaml")
    assert releases["operator"]["PodMonitor", "gpumem-exporter-sidecar"]["spec"] == sidecars["spec"]
    plain = read(KUBERNETES / "prometheus-operator" / "podmonitor.yaml")
    chart = releases["operator"]["PodMonitor", "gpumem-exporter"]
    assert chart["metadata"]["labels"]["release"] == "monitoring"
    spec = {**chart["spec"], "selector": without_instance(chart["spec"]["selector"])}
    assert spec == plain["spec"]


def test_the_service_monitor_scrapes_as_the_pod_monitor(releases: dict[str, Objects]) -> None:
    objects = releases["everything"]
    monitor, service = of_kind(objects, "ServiceMonitor"), of_kind(objects, "Service")
    labels = service["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    (endpoint,) = monitor["spec"]["endpoints"]
    (of_pods,) = releases["operator"]["PodMonitor", "gpumem-exporter"]["spec"]["podMetricsEndpoints"]
    assert endpoint == {**of_pods, "interval": "30s", "honorLabels": True}
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    pods = of_kind(objects, "DaemonSet")["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= pods.items()


# --- Rules and dashboards


def test_the_rules_are_those_of_prometheus_with_the_urls_of_the_values(releases: dict[str, Objects]) -> None:
    for path in sorted((REPOSITORY / "deploy" / "prometheus" / "rules").rglob("*.yml")):
        wanted = read(path)
        for group in wanted["groups"]:
            group["rules"] = [rule for rule in group["rules"] if rule.get("alert") != "GpuMemDeviceUnderused"]
            for rule in group["rules"]:
                if "alert" in rule:
                    url = rule["annotations"]["runbook_url"]
                    assert url.count("http://{{") == url.count("}}/runbooks/") == 1
                    url = url.replace("http://{{", "https://{{").replace("}}/runbooks/", "}}.gpumem.example/runbooks/")
                    rule["annotations"]["runbook_url"] = url
        assert releases["operator"]["PrometheusRule", f"gpumem-exporter-{path.stem}"]["spec"] == wanted
    everything = [each["spec"] for (kind, _), each in releases["everything"].items() if kind == "PrometheusRule"]
    alerts = [rule for spec in everything for group in spec["groups"] for rule in group["rules"] if "alert" in rule]
    urls = {rule["alert"]: rule["annotations"]["runbook_url"] for rule in alerts}
    assert "GpuMemLeak" in urls
    assert not {"GpuMemCoverageLow", "GpuMemInactive", "GpuMemKvCacheUnused"} & urls.keys()
    assert urls == {name: f"https://wiki.example/runbooks/{name}" for name in urls}


def test_every_dashboard_is_a_config_map_for_the_sidecar_of_grafana(releases: dict[str, Objects]) -> None:
    plain = read(REPOSITORY / "grafana" / "kustomization.yaml")["generatorOptions"]
    for path in sorted((REPOSITORY / "grafana" / "dashboards").glob("*.json")):
        config_map = releases["operator"]["ConfigMap", f"gpumem-exporter-dashboard-{path.stem}"]
        wanted = json.loads(path.read_text(encoding="utf-8"))
        values = {"live_page": "https://", "live_page_end": ".gpumem.example/"}
        for variable in wanted["templating"]["list"]:
            variable["query"] = values.get(variable["name"], variable.get("query"))
        assert json.loads(config_map["data"][path.name]) == wanted
        metadata = config_map["metadata"]
        assert metadata["namespace"] == "monitoring"
        assert metadata["labels"].items() >= plain["labels"].items()
        assert metadata["annotations"] == plain["annotations"]
    assert not [name for kind, name in releases["no-actions"] if kind == "ConfigMap"]


def test_a_packaged_chart_contains_the_files_behind_its_links(tmp_path: Path) -> None:
    import asyncio

    packaged = asyncio.run(helm.Package(helm.Configuration()).run(str(CHART), str(tmp_path)))
    with tarfile.open(packaged) as archive:
        for linked in sorted(path for path in (*CHART.glob("files/*/*"), *CHART.glob("files/*/*/*")) if path.is_file()):
            member = archive.extractfile(f"gpumem-exporter/{linked.relative_to(CHART)}")
            assert member is not None
            assert member.read() == linked.read_bytes()
        assert not [name for name in archive.getnames() if "/ci/" in name]


# --- Values


@pytest.mark.parametrize(
    "settings",
    [
        {"report.expiry": 1},
        {"report.interval": 0.5, "report.expiry": 1},
        {"storage.max-bytes": 16777216.5},
        {"action.allow": ["gc"]},
        {"action.allow": ["default", "terminate"]},
        {"web.hide-identities": True},
        {"log.level": "loud"},
    ],
    ids=str,
)
def test_the_chart_accepts_the_settings_that_the_exporter_accepts(cluster: Cluster, settings: dict[str, Any]) -> None:
    """A setting that the exporter refuses must not reach a pod, which would end again and again."""
    texts = {key: ",".join(value) if isinstance(value, list) else str(value).lower() for key, value in settings.items()}
    environment = {environment_name(key): text for key, text in texts.items()}
    try:
        load_settings(environ=environment)
    except ConfigurationError:
        with pytest.raises(helm.InstallError, match=next(iter(settings))):
            cluster.install({"settings": settings})
    else:
        (container,) = pod_of(cluster.objects({"settings": settings}))["containers"]
        assert {item["name"]: item["value"] for item in container["env"]}.items() >= environment.items()


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"actionToken": {"existingSecret": "a", "value": "b"}}, "actionToken: existingSecret and value are both set"),
        ({"tls": {"existingSecret": "a", "certificate": "b", "key": "c"}}, "tls: existingSecret and certificate"),
        ({"processDetails": True, "securityContext": {"runAsUser": 65532}}, "processDetails: needs"),
        ({"hostNetwork": True, "hostPort": 80}, "hostNetwork: the port of the node is 9844"),
        ({"hostNetwork": True, "networkPolicy": {"enabled": True}}, "networkPolicy: has no effect"),
        ({"prometheusRule": {"enabled": True}}, "monitor.kind"),
    ],
)
def test_values_that_contradict_each_other_are_an_error(cluster: Cluster, values: dict[str, Any], reason: str) -> None:
    with pytest.raises(helm.InstallError, match=reason):
        cluster.install(values)


def test_a_user_other_than_root_has_no_capability_and_its_folders_get_one(releases: dict[str, Objects]) -> None:
    pod = pod_of(releases["nonroot"])
    (folders,) = pod["initContainers"]
    on_the_host = {volume["name"] for volume in pod["volumes"] if "hostPath" in volume}
    assert {mount["name"] for mount in folders["volumeMounts"]} == on_the_host
    assert folders["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN"]}
    assert exporter_of(releases["nonroot"])["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_the_links_to_the_live_page_lead_to_the_port_of_the_node(
    cluster: Cluster, releases: dict[str, Objects]
) -> None:
    node = {"dashboards": {}, "hostNetwork": True, "tls": {"existingSecret": "certificate"}}
    for objects, ends in (
        (releases["default"], ("http://", "/")),
        (cluster.objects(node), ("https://", ":9844/")),
    ):
        dashboard = objects["ConfigMap", "gpumem-exporter-dashboard-node"]["data"]["node.json"]
        variables = {each["name"]: each.get("query") for each in json.loads(dashboard)["templating"]["list"]}
        assert (variables["live_page"], variables["live_page_end"]) == ends


def test_null_removes_the_default_of_a_value(cluster: Cluster) -> None:
    values = {
        name: None
        for name, default in read(CHART / "values.yaml").items()
        if default == {} or name in ("nodeSelector", "tolerations", "resources", "runtimeClassName", "securityContext")
    }
    objects = cluster.objects({**values, "dashboards": {"labels": None, "annotations": None}})
    for document in objects.values():
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    assert not pod_of(objects).keys() & values.keys()


def test_the_restricted_pod_meets_the_pod_security_standard(releases: dict[str, Objects]) -> None:
    pod = pod_of(releases["restricted"])
    assert not pod.keys() & {"hostPID", "hostNetwork", "hostIPC"}
    assert {kind for volume in pod["volumes"] for kind in volume.keys() - {"name"}} == {"emptyDir", "secret"}
    (container,) = pod["containers"]
    security = container["securityContext"]
    assert security == {
        "runAsUser": 1000680000,
        "runAsGroup": 1000680000,
        "runAsNonRoot": True,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_the_network_policy_admits_prometheus_and_the_test_to_the_exporter(releases: dict[str, Objects]) -> None:
    objects = releases["operator"]
    policy = of_kind(objects, "NetworkPolicy")["spec"]
    pods = of_kind(objects, "DaemonSet")["spec"]["template"]
    assert policy["podSelector"]["matchLabels"].items() <= pods["metadata"]["labels"].items()
    (rule,) = policy["ingress"]
    test, prometheus = rule["from"]
    assert test["podSelector"]["matchLabels"].items() <= of_kind(objects, "Pod")["metadata"]["labels"].items()
    assert prometheus["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "prometheus"}
    (namespaces,) = prometheus["namespaceSelector"]["matchExpressions"]
    assert namespaces == {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["monitoring"]}
    (container,) = pods["spec"]["containers"]
    assert [port["port"] for port in rule["ports"]] == [port["name"] for port in container["ports"]]


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ({"hostPID": "yes"}, "/hostPID"),
        ({"image": {"tga": "1"}}, "tga"),
        ({"settings": {"web.listen-address": ":80"}}, "web.listen-address"),
        ({"policy": {"rules": [{**RULE, "cooldwon": "1h"}]}}, "cooldwon"),
        ({"dashboards": {"livePageUrl": "https://gpumem.example/"}}, "/dashboards/livePageUrl"),
        ({"prometheusRule": {"disabled": ["GpuMemLeek"]}}, "/prometheusRule/disabled/0"),
        ({"tls": {"certificate": "PEM"}}, "/tls/key"),
        ({"resources": {"limit": {"memory": "1Gi"}}}, "/resources"),
        ({"webhook": {"resources": {"limits": {"memory": None, "cpu": []}}}}, "/webhook/resources/limits/cpu"),
    ],
)
def test_the_schema_rejects_a_value_and_names_it(cluster: Cluster, values: dict[str, Any], place: str) -> None:
    with pytest.raises(helm.InstallError) as raised:
        cluster.install(values)
    assert f"{place}'" in str(raised.value)
