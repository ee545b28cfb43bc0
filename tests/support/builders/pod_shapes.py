"""Pods as controllers create them, what the webhook does with each, and its reviews."""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jsonpatch
import yaml

from gpumem_exporter.features.webhook.webhook_server import answer
from tests.support.paths import REPOSITORY

Pod = dict[str, Any]
CLIENT = "/run/gpumem/client"
POD_NAME = "metadata.name"
WORKER_INDEX = "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']"


@dataclass
class Shape:
    """A pod, and the result of its injection."""

    pod: Pod
    python_paths: Mapping[str, str] = field(default_factory=dict)
    """PYTHONPATH by container, of the containers with the client."""
    workload: str = ""
    """The default workload, or the field of the downward API."""
    rank: str | None = None
    left_alone: tuple[str, ...] = ()
    """A word in each reason why the pod or a container does not get the client."""


def container(name: str = "trainer", gpus: int | str | None = 1, **fields: Any) -> Pod:
    resources = {} if gpus is None else {"resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}
    return {"name": name, "image": f"{name}:1", **resources, **fields}


def pod(
    *containers: Pod,
    name: str = "",
    labels: Mapping[str, str] | None = None,
    owner: tuple[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    **spec: Any,
) -> Pod:
    metadata: Pod = {"namespace": "team-a", "labels": {"app": "x", **(labels or {})}}
    metadata |= {"name": name} if name else {"generateName": "made-"}
    if annotations:
        metadata["annotations"] = dict(annotations)
    if owner:
        kind, owner_name = owner
        reference = {"apiVersion": "v1", "kind": kind, "name": owner_name, "uid": "1-2-3", "controller": True}
        metadata["ownerReferences"] = [{**reference, "kind": "Other", "controller": False}, reference]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"containers": list(containers) or [container()], **spec},
    }


def _of_manifest(name: str) -> Pod:
    """The pod of a Job in deploy/kubernetes."""
    (job,) = yaml.safe_load_all((REPOSITORY / "deploy" / "kubernetes" / name).read_text(encoding="utf-8"))
    template = job["spec"]["template"]
    made = pod(owner=("Job", "training"), labels={"batch.kubernetes.io/job-name": "training"})
    return {**made, "spec": template["spec"]}


def _of_jobset(job: str, *, replicas: int, index: int) -> Pod:
    labels = {
        "jobset.sigs.k8s.io/jobset-name": "llm",
        "jobset.sigs.k8s.io/global-replicas": str(replicas),
        "batch.kubernetes.io/job-name": job,
        "batch.kubernetes.io/job-completion-index": str(index),
    }
    return pod(labels=labels, owner=("Job", job))


def _volume(name: str, **source: Any) -> Pod:
    return {"name": name, **source}


def _mounted(path: str, volume: Pod, **mount: Any) -> Pod:
    return pod(
        container(volumeMounts=[{"name": volume["name"], "mountPath": path, **mount}]), name="own", volumes=[volume]
    )


_EMPTY = _volume("scratch", emptyDir={})
_TRAINER = {"trainer": CLIENT}

SHAPES: dict[str, Shape] = {
    "indexed job": Shape(
        pod(
            labels={"batch.kubernetes.io/job-name": "train", "batch.kubernetes.io/job-completion-index": "3"},
            owner=("Job", "train"),
            restartPolicy="Never",
        ),
        _TRAINER,
        "train",
        "3",
    ),
    "job of an old cluster": Shape(
        pod(annotations={"batch.kubernetes.io/job-completion-index": "0"}, owner=("Job", "train")),
        _TRAINER,
        "train",
        "0",
    ),
    "jobset with one job": Shape(_of_jobset("llm-node-0", replicas=1, index=5), _TRAINER, "llm", "5"),
    "jobset with two jobs": Shape(_of_jobset("llm-node-1", replicas=2, index=0), _TRAINER, "llm"),
    "pytorchjob": Shape(
        pod(
            container("pytorch", 8, env=[{"name": "RANK", "value": "1"}, {"name": "PYTHONPATH", "value": "/app:"}]),
            name="finetune-worker-0",
            labels={
                "training.kubeflow.org/job-name": "finetune",
                "training.kubeflow.org/replica-type": "worker",
                "training.kubeflow.org/replica-index": "0",
            },
            owner=("PyTorchJob", "finetune"),
        ),
        {"pytorch": f"{CLIENT}:/app:"},
        "finetune",
    ),
    "leaderworkerset": Shape(
        pod(name="vllm-0-1", labels={"leaderworkerset.sigs.k8s.io/name": "vllm"}, owner=("StatefulSet", "vllm-0")),
        _TRAINER,
        "vllm",
        WORKER_INDEX,
    ),
    "statefulset": Shape(pod(name="notebook-12", owner=("StatefulSet", "notebook")), _TRAINER, "notebook", "12"),
    "deployment with envFrom": Shape(
        pod(
            container(envFrom=[{"secretRef": {"name": "settings"}}]),
            labels={"pod-template-hash": "7d9f"},
            owner=("ReplicaSet", "serve-7d9f"),
        ),
        {"trainer": f"{CLIENT}:$(PYTHONPATH)"},
        "serve",
    ),
    "ray worker": Shape(
        pod(
            container("ray-worker", env=[{"name": "PYTHONPATH", "value": ""}]),
            container("autoscaler", None),
            labels={"ray.io/cluster": "tune", "ray.io/node-type": "worker"},
            owner=("RayCluster", "tune"),
            initContainers=[container("wait-gcs-ready", None)],
        ),
        {"ray-worker": CLIENT},
        "tune",
    ),
    "bare pod in the host's namespaces": Shape(pod(hostNetwork=True, hostPID=True), _TRAINER, POD_NAME),
    "bare pod with a name": Shape(pod(name="shell", hostUsers=True), _TRAINER, "shell"),
    "MIG and a sidecar": Shape(
        pod(
            {
                **container("worker", None, env=[{"name": "PYTHONPATH", "value": "$(HOME)/lib"}]),
                "resources": {"requests": {"nvidia.com/mig-1g.10gb": "1"}, "limits": {"nvidia.com/mig-1g.10gb": "1"}},
            },
            container("logs", None),
            container("no-gpu", 0),
            owner=("Workflow", "pipeline"),
        ),
        {"worker": f"{CLIENT}:$(HOME)/lib"},
        "pipeline",
    ),
    "DRA claims in init container and sidecar": Shape(
        pod(
            {**container("main", None), "resources": {"claims": [{"name": "gpu"}]}},
            name="claims",
            initContainers=[
                {**container("warm-up", None), "resources": {"claims": [{"name": "gpu"}]}},
                {**container("proxy", None), "restartPolicy": "Always"},
            ],
            resourceClaims=[{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}],
        ),
        {"main": CLIENT, "warm-up": CLIENT},
        "claims",
    ),
    "read-only root with its own /run": Shape(
        pod(
            container(
                securityContext={"readOnlyRootFilesystem": True, "runAsUser": 1000, "capabilities": {"drop": ["ALL"]}},
                volumeMounts=[{"name": "scratch", "mountPath": "/run/"}],
            ),
            name="strict",
            volumes=[_EMPTY],
        ),
        _TRAINER,
        "strict",
    ),
    "volumes with the same names": Shape(
        pod(
            name="taken",
            volumes=[_volume("gpumem", persistentVolumeClaim={"claimName": "data"}), _volume("gpumem-2", emptyDir={})],
        ),
        _TRAINER,
        "taken",
    ),
    "its own mount of the host's folder": Shape(_of_manifest("training.yaml"), {"training": CLIENT}, "training"),
    "its own exporter": Shape(_of_manifest("sidecar.yaml"), left_alone=("/run/gpumem",)),
    "another volume at the path": Shape(_mounted("/var/run/gpumem", _EMPTY), left_alone=("/run/gpumem",)),
    "a part of the host's folder": Shape(
        _mounted("/run/gpumem", _volume("host", hostPath={"path": "/run/gpumem/"}), subPath="x"),
        left_alone=("/run/gpumem",),
    ),
    "a volume below the path": Shape(_mounted("/run/gpumem/x", _EMPTY), left_alone=("/run/gpumem",)),
    "a volume that cannot have the mount point": Shape(
        _mounted("/run", _volume("run", configMap={"name": "x"})), left_alone=("/run,",)
    ),
    "PYTHONPATH with valueFrom in one container": Shape(
        pod(
            container("good"),
            container(
                "bad",
                env=[{"name": "PYTHONPATH", "valueFrom": {"configMapKeyRef": {"name": "paths", "key": "python"}}}],
            ),
            name="mixed",
        ),
        {"good": CLIENT},
        "mixed",
        left_alone=("valueFrom",),
    ),
    "defined twice": Shape(
        pod(
            container(env=[{"name": "PYTHONPATH", "value": "/a"}, {"name": "PYTHONPATH", "value": "$(PYTHONPATH):/b"}]),
            name="twice",
        ),
        {"trainer": f"{CLIENT}:$(PYTHONPATH):/b"},
        "twice",
    ),
    "a copy of an injected pod": Shape(
        pod(
            container(
                env=[
                    {"name": "PYTHONPATH", "value": f"/x:{CLIENT}"},
                    {"name": "GPUMEM_DEFAULT_WORKLOAD", "value": "the-original"},
                ]
            ),
            name="copy",
        ),
        {"trainer": f"/x:{CLIENT}"},
        "copy",
    ),
    "all containers, for a scheduler of GPU fractions": Shape(
        pod(
            container("main", None),
            container("helper", None),
            name="fraction",
            annotations={"gpumem.io/containers": "*", "gpu-fraction": "0.5"},
        ),
        {"main": CLIENT, "helper": CLIENT},
        "fraction",
    ),
    "named containers": Shape(
        pod(
            container("main", None),
            container("helper"),
            name="named",
            annotations={"gpumem.io/containers": "main, absent"},
        ),
        {"main": CLIENT},
        "named",
        left_alone=("absent",),
    ),
    "Windows": Shape(pod(os={"name": "windows"}), left_alone=("Windows",)),
    "a user namespace": Shape(pod(hostUsers=False), left_alone=("hostUsers",)),
    "no GPU, with the label": Shape(
        pod(container(gpus=None), labels={"gpumem.io/inject": "true"}), left_alone=("gpumem.io/containers",)
    ),
    "no GPU, in a namespace with the label": Shape(pod(container(gpus=None))),
    "opted out": Shape(pod(labels={"gpumem.io/inject": "false"})),
    "static pod": Shape(pod(name="static", annotations={"kubernetes.io/config.mirror": "x"}, owner=("Node", "n"))),
}


def review_of(created: Pod) -> dict[str, Any]:
    """The request of the API server, as a JSON document."""
    request = {
        "uid": "705ab4f5",
        "kind": {"group": "", "version": "v1", "kind": "Pod"},
        "resource": {"group": "", "version": "v1", "resource": "pods"},
        "namespace": "team-a",
        "operation": "CREATE",
        "userInfo": {"username": "system:serviceaccount:kube-system:job-controller"},
        "object": created,
        "oldObject": None,
        "dryRun": False,
    }
    return dict(
        json.loads(json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}))
    )


def answered(created: Pod, **options: Any) -> tuple[Pod, dict[str, Any]]:
    """Return the pod after the patch, and the response."""
    document = json.loads(json.dumps(answer(review_of(created), **options)))
    response = document["response"]
    assert (document["apiVersion"], document["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
    assert (response["uid"], response["allowed"]) == ("705ab4f5", True)
    if "patch" not in response:
        return created, response
    assert response["patchType"] == "JSONPatch"
    patch = jsonpatch.JsonPatch(json.loads(base64.b64decode(response["patch"])))
    return dict(patch.apply(copy.deepcopy(created))), response
