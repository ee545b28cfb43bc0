"""docker-compose.yml, the Kubernetes manifests and Grafana's provisioning are consistent, and their files exist.

tests/stack runs the containers, which needs root and takes minutes.
"""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from gpumem_client.wire.http import DEFAULT_URLS
from gpumem_exporter.settings import Settings
from tests.support.paths import REPOSITORY

DEPLOY = REPOSITORY / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
KUSTOMIZATIONS = sorted(
    path.relative_to(REPOSITORY).as_posix() for path in REPOSITORY.glob("[dg]*/**/kustomization.yaml")
)


def read(path: str) -> Any:
    """Read a YAML file with one document."""
    return yaml.safe_load((REPOSITORY / path).read_text(encoding="utf-8"))


def documents(path: str) -> list[dict[str, Any]]:
    """Read all documents of a YAML file."""
    return list(yaml.safe_load_all((REPOSITORY / path).read_text(encoding="utf-8")))


def services() -> dict[str, dict[str, Any]]:
    return dict(read("docker-compose.yml")["services"])


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """Return the volumes of a compose service by their path in the container."""
    return {volume.split(":")[1]: volume.split(":")[0] for volume in service["volumes"]}


def test_compose_mounts_existing_paths_and_publishes_only_on_loopback() -> None:
    compose = read("docker-compose.yml")
    for name, service in compose["services"].items():
        assert service["ports"], name
        for port in service["ports"]:
            assert port.startswith("127.0.0.1:"), f"{name}: {port}"
        for volume in service["volumes"]:
            source, _, options = volume.partition(":")
            assert (REPOSITORY / source).exists() if source.startswith(".") else source in compose["volumes"], volume
            assert not source.startswith(".") or options.endswith(":ro"), volume


def test_every_container_of_compose_is_restricted_and_has_a_health_check() -> None:
    for name, service in services().items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert re.fullmatch(r"\d+[mg]", service["mem_limit"]), name
        if "build" in service:
            assert re.search(r"^HEALTHCHECK ", (REPOSITORY / "Dockerfile").read_text(), flags=re.MULTILINE)
        else:
            default = r"[\w-]+/[\w-]+:v?\d+\.\d+\.\d+"
            assert re.fullmatch(rf"\${{{name.upper()}_IMAGE:-{default}}}", service["image"]), name
            port = service["ports"][0].rpartition(":")[2]
            assert f"http://127.0.0.1:{port}/" in service["healthcheck"]["test"][-1], name


@pytest.mark.parametrize("name", ["exporter", "sidecar", "demo"])
def test_events_are_in_a_volume_that_the_user_of_the_image_can_write(name: str) -> None:
    service, dockerfile = services()[name], (REPOSITORY / "Dockerfile").read_text()
    folder = service["environment"]["GPUMEM_STORAGE_PATH"]
    assert mounts(service)[folder] in read("docker-compose.yml")["volumes"]
    (user,) = re.findall(r"^USER (\d+):\1$", dockerfile, flags=re.MULTILINE)
    assert f"install -d -o {user} -g {user} -m 0700 {folder}\n" in dockerfile
    other = services()["exporter" if name == "demo" else "demo"]
    assert mounts(service)[folder] != mounts(other)[folder], "events of the demo must not be in the node's history"


def test_grafana_has_all_dashboards_and_opens_the_fleet() -> None:
    grafana = services()["grafana"]
    (provider,) = read("grafana/provisioning/dashboards/gpumem.yml")["providers"]
    folder = provider["options"]["path"]
    assert mounts(grafana)[folder] == "./grafana/dashboards"
    assert mounts(grafana)["/etc/grafana/provisioning"] == "./grafana/provisioning"
    assert grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == f"{folder}/fleet.json"
    assert (REPOSITORY / "grafana/dashboards/fleet.json").is_file()


def test_grafanas_data_sources_are_the_services_with_the_scrape_interval() -> None:
    sources = {source["type"]: source for source in read("grafana/provisioning/datasources/gpumem.yml")["datasources"]}
    for kind in ("prometheus", "alertmanager"):
        port = services()[kind]["ports"][0].rpartition(":")[2]
        assert sources[kind]["url"] == f"http://{kind}:{port}"
    settings = sources["prometheus"]["jsonData"]
    assert settings["timeInterval"] == read("deploy/prometheus/prometheus.yml")["global"]["scrape_interval"]
    assert settings["alertmanagerUid"] == sources["alertmanager"]["uid"]


@pytest.mark.parametrize("name", ["exporter.yaml", "sidecar.yaml", "training.yaml"])
def test_every_object_is_valid_in_kubernetes(name: str) -> None:
    for document in documents(f"deploy/kubernetes/{name}"):
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def daemonset() -> dict[str, Any]:
    (found,) = (
        document for document in documents("deploy/kubernetes/exporter.yaml") if document["kind"] == "DaemonSet"
    )
    return found


def test_the_daemonset_keeps_events_on_the_host_and_has_no_capability() -> None:
    pod = daemonset()["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (storage,) = (item["value"] for item in container["env"] if item["name"] == "GPUMEM_STORAGE_PATH")
    (volume,) = (mount["name"] for mount in container["volumeMounts"] if storage.startswith(mount["mountPath"] + "/"))
    (source,) = (item for item in pod["volumes"] if item["name"] == volume)
    assert source["hostPath"]["type"] == "DirectoryOrCreate"
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_probes_that_restart_the_exporter_do_not_need_the_driver() -> None:
    (container,) = daemonset()["spec"]["template"]["spec"]["containers"]
    paths = {probe: container[probe]["httpGet"]["path"] for probe in ("startupProbe", "livenessProbe")}
    # This route answers while the driver hangs: see tests/together/web/test_server_pages.py.
    assert set(paths.values()) == {"/-/healthy"}, paths
    assert container["readinessProbe"]["httpGet"]["path"] == "/health"


def test_process_details_patches_the_capabilities_of_the_daemonset() -> None:
    component = read("deploy/kubernetes/process-details/kustomization.yaml")
    (patch,) = component["patches"]
    assert patch["target"] == {"kind": "DaemonSet", "name": daemonset()["metadata"]["name"]}
    (operation,) = yaml.safe_load(patch["patch"])
    *way, added = operation["path"].split("/")[1:]
    place: Any = daemonset()
    for step in way:
        place = place[int(step)] if isinstance(place, list) else place[step]
    assert (place, added) == ({"drop": ["ALL"]}, "add")
    assert operation["value"] == ["SYS_PTRACE", "DAC_READ_SEARCH"]


def test_systemd_keeps_the_folder_of_the_socket_across_restarts() -> None:
    unit = (DEPLOY / "systemd" / "gpumem-exporter.service").read_text(encoding="utf-8")
    settings = dict(re.findall(r"^(\w+)=(.*)$", unit, flags=re.MULTILINE))
    assert (settings["RuntimeDirectory"], settings["RuntimeDirectoryPreserve"]) == ("gpumem", "yes")
    assert f"\nEnvironment=GPUMEM_WEB_LISTEN_SOCKET=/run/{settings['RuntimeDirectory']}/exporter.sock\n" in unit
    assert "DynamicUser" not in settings, "the preserved folder of a dynamic user is in /run/private"


def test_the_units_of_systemd_are_valid(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    folder = DEPLOY / "systemd"
    unit = (folder / "gpumem-exporter.service").read_text(encoding="utf-8")
    (tmp_path / "gpumem-exporter.service").write_text(re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", unit))
    shutil.copy(folder / "gpumem-exporter.socket", tmp_path)
    (tmp_path / "job.service").write_text("[Service]\nExecStart=/bin/true\n")
    (tmp_path / "job.service.d").mkdir()
    shutil.copy(folder / "gpumem-job.conf", tmp_path / "job.service.d" / "gpumem.conf")
    checked = subprocess.run(
        [
            analyze,
            "verify",
            "--man=no",
            "--recursive-errors=yes",
            *map(str, filter(Path.is_file, sorted(tmp_path.iterdir()))),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (checked.returncode, checked.stderr) == (0, "")


def test_the_sockets_of_systemd_are_those_of_the_service_without_them() -> None:
    sockets = re.findall(r"(?m)^ListenStream=(.*)$", (DEPLOY / "systemd" / "gpumem-exporter.socket").read_text())
    service = (DEPLOY / "systemd" / "gpumem-exporter.service").read_text(encoding="utf-8")
    (path,) = re.findall(r"(?m)^Environment=GPUMEM_WEB_LISTEN_SOCKET=(.*)$", service)
    assert sockets == [Settings().web_listen_address[0].lstrip(":"), path]


def test_training_containers_mount_the_socket_read_only() -> None:
    (job,) = documents("deploy/kubernetes/training.yaml")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert [mount["readOnly"] for mount in container["volumeMounts"]] == [True]


@pytest.mark.parametrize(
    "recipe",
    [
        *("docker-compose.yml", "deploy/systemd/gpumem-exporter.service", "deploy/kubernetes/exporter.yaml"),
        *("deploy/kubernetes/training.yaml", "deploy/jobs/cdi.yaml", "deploy/jobs/compose.yaml"),
        *("deploy/systemd/gpumem-job.conf", "deploy/jobs/jupyterhub_config.py"),
    ],
)
def test_every_recipe_uses_the_same_folder_for_the_client(recipe: str) -> None:
    lines = [line for line in (REPOSITORY / recipe).read_text().splitlines() if not line.lstrip().startswith("#")]
    named = re.findall(r"(?:GPUMEM_CLIENT_DIRECTORY|PYTHONPATH)\W+(?:value\W+)?(/[\w/]+)", "\n".join(lines))
    assert set(named) == {"/run/gpumem/client"}


@pytest.mark.parametrize(
    ("before", "after"), [(None, "FOLDER/client"), ("/app", "FOLDER/client:/app"), ("", "FOLDER/client")]
)
def test_the_profile_adds_no_empty_entry_to_pythonpath(tmp_path: Path, before: str | None, after: str) -> None:
    script = (DEPLOY / "jobs" / "profile.sh").read_text(encoding="utf-8").replace("/run/gpumem", str(tmp_path))
    environment = {} if before is None else {"PYTHONPATH": before}
    command = ["/bin/sh", "-euc", f'{script}\nprintf %s "$PYTHONPATH"']
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert shown == after.replace("FOLDER", str(tmp_path))


def test_a_sidecar_shares_a_folder_of_its_own_and_needs_nothing_of_the_host() -> None:
    (job,) = documents("deploy/kubernetes/sidecar.yaml")
    pod = job["spec"]["template"]["spec"]
    assert not pod.keys() & {"hostPID", "hostNetwork", "hostIPC"}
    (volume,) = pod["volumes"]
    assert "emptyDir" in volume
    (sidecar,), (training,) = pod["initContainers"], pod["containers"]
    assert sidecar["restartPolicy"] == "Always"
    assert sidecar["startupProbe"], "the training must find the socket"
    (whole,), (shared,) = sidecar["volumeMounts"], training["volumeMounts"]
    # Every user may write to an emptyDir itself.
    socket = f"{whole['mountPath']}/{shared['subPath']}/exporter.sock"
    assert {"name": "GPUMEM_WEB_LISTEN_SOCKET", "value": socket} in sidecar["env"]
    assert f"unix://{shared['mountPath']}/exporter.sock" in DEFAULT_URLS
    assert shared["readOnly"] is True


@pytest.mark.parametrize("path", KUSTOMIZATIONS)
def test_the_files_of_a_kustomization_exist(path: str) -> None:
    here, kustomization = (REPOSITORY / path).parent, read(path)
    named = kustomization.get("resources", [])
    assert all((here / name).exists() for name in named), named
    files = [file for generated in kustomization.get("configMapGenerator", ()) for file in generated["files"]]
    assert all((here / file).is_file() for file in files), files
    assert named or files or kustomization["kind"] == "Component"


def test_every_dashboard_is_a_config_map_small_enough_for_kubectl_apply() -> None:
    generated = read("grafana/kustomization.yaml")["configMapGenerator"]
    named = [file for config_map in generated for file in config_map["files"]]
    dashboards = sorted((REPOSITORY / "grafana" / "dashboards").glob("*.json"))
    assert sorted(named) == [f"dashboards/{path.name}" for path in dashboards]
    assert all(len(config_map["files"]) == 1 for config_map in generated)
    # kubectl keeps the object in an annotation as JSON in JSON, in which quotes and line ends take two bytes.
    for path in dashboards:
        text = path.read_text()
        assert len(text) + text.count('"') + text.count("\n") < 256 << 10, path.name
    assert "../../grafana" in read("deploy/kubernetes/kustomization.yaml")["resources"]


def test_the_rules_of_kubernetes_are_those_of_prometheus() -> None:
    build = runpy.run_path(str(KUBERNETES / "prometheus-operator" / "build.py"))
    made = (KUBERNETES / "prometheus-operator" / "prometheusrule.yaml").read_text(encoding="utf-8")
    assert made == build["prometheus_rules"](), "run python deploy/kubernetes/prometheus-operator/build.py"
    objects = documents("deploy/kubernetes/prometheus-operator/prometheusrule.yaml")
    files = sorted((DEPLOY / "prometheus" / "rules").glob("*.yml"))
    assert [rule["spec"] for rule in objects] == [read(path.relative_to(REPOSITORY).as_posix()) for path in files]
    assert [rule["metadata"]["name"] for rule in objects] == [f"gpumem-{path.stem}" for path in files]
    assert files


def test_the_pod_monitor_scrapes_the_daemonset_with_the_labels_of_dashboards_and_rules() -> None:
    monitor, agent = read("deploy/kubernetes/prometheus-operator/podmonitor.yaml"), daemonset()
    assert monitor["spec"]["selector"] == agent["spec"]["selector"]
    assert monitor["metadata"]["namespace"] == agent["metadata"]["namespace"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    (container,) = agent["spec"]["template"]["spec"]["containers"]
    assert endpoint["port"] in {port["name"] for port in container["ports"]}
    assert endpoint["interval"] == read("deploy/prometheus/prometheus.yml")["global"]["scrape_interval"]
    labels = {rule["targetLabel"]: rule for rule in endpoint["relabelings"] if "targetLabel" in rule}
    assert labels["job"] == {"targetLabel": "job", "replacement": "gpumem"}
    assert labels["instance"]["sourceLabels"] == ["__meta_kubernetes_pod_node_name"]
    # The operator adds the pod's name to every series, which would create new series after each restart.
    assert {"action": "labeldrop", "regex": "pod|container"} in endpoint["relabelings"]
