"""The names that a pod gives its processes: the workload and the rank, from its labels and its owner.

They are defaults, which the client uses if nothing else names the process: see docs/reporting.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

Source: TypeAlias = dict[str, Any]
"""The fields of a variable of a container besides its name: `value`, or `valueFrom`."""

_LWS = "leaderworkerset.sigs.k8s.io/"
_JOBSET = "jobset.sigs.k8s.io/"
# Labels with the name of a workload whose pods have another controller: a JobSet creates Jobs.
_WORKLOADS = (f"{_JOBSET}jobset-name", "training.kubeflow.org/job-name", f"{_LWS}name")
# The longest name of an object. The API server checks it only later.
_NAME_CHARACTERS = 253
_COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"


def default_names(metadata: Mapping[str, Any]) -> dict[str, Source]:
    """Return the variables with the default names of the processes of a pod."""
    found = {"GPUMEM_DEFAULT_WORKLOAD": _workload(metadata), "GPUMEM_DEFAULT_RANK": _rank(metadata)}
    return {name: source for name, source in found.items() if source is not None}


def _workload(metadata: Mapping[str, Any]) -> Source:
    labels = metadata.get("labels") or {}
    for label in _WORKLOADS:
        if labels.get(label):
            return {"value": labels[label][:_NAME_CHARACTERS]}
    kind, name = _controller(metadata)
    if kind == "ReplicaSet":
        # The name of the Deployment or of Argo's Rollout, which is not an owner of the pod itself.
        template = labels.get("pod-template-hash") or labels.get("rollouts-pod-template-hash") or ""
        name = name.removesuffix(f"-{template}")
    name = name or metadata.get("name") or ""
    # The API server chooses the name of a pod with `generateName` after the admission.
    return {"value": name[:_NAME_CHARACTERS]} if name else _field("metadata.name")


def _rank(metadata: Mapping[str, Any]) -> Source | None:
    """Return the index of the pod in its workload, if that has one; None without."""
    labels = metadata.get("labels") or {}
    if f"{_LWS}name" in labels:
        # The webhook of LeaderWorkerSet sets the label, perhaps after this one.
        return _field(f"metadata.labels['{_LWS}worker-index']")
    if f"{_JOBSET}jobset-name" in labels and labels.get(f"{_JOBSET}global-replicas") != "1":
        return None  # the indexes of its Jobs overlap
    index = labels.get(_COMPLETION_INDEX) or (metadata.get("annotations") or {}).get(_COMPLETION_INDEX)
    kind, owner = _controller(metadata)
    if not index and kind == "StatefulSet":
        index = (metadata.get("name") or "").removeprefix(f"{owner}-")
    return {"value": index[:_NAME_CHARACTERS]} if index and index.isdecimal() else None


def _controller(metadata: Mapping[str, Any]) -> tuple[str, str]:
    """Return the kind and the name of the object that controls a pod; empty without one."""
    owners = metadata.get("ownerReferences") or ()
    return next(((owner["kind"], owner["name"]) for owner in owners if owner.get("controller")), ("", ""))


def _field(path: str) -> Source:
    # With the version, because the API server would add it.
    return {"valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}
