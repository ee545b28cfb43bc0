"""The changes to a pod, as a JSON patch (RFC 6902): which containers get the client of the node, and how.

A container gets a mount of the folder of the host with the client and the exporter's socket, the client in front of its
PYTHONPATH, and default names. A container in which the client could break something stays as it is, with a reason.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from gpumem_exporter.features.webhook.pod_workload import default_names

LABEL = "gpumem.io/inject"
"""On a pod, or on its namespace: `true` to change it. The label of the pod takes precedence."""
CONTAINERS = "gpumem.io/containers"
"""Annotation of a pod: the names of the containers to change, separated by commas, or `*`."""
RESULT = "gpumem.io/injection"
"""Annotation that the webhook adds: what it did, by container."""

MOUNT = "/run/gpumem"
"""Where the client looks for the exporter's socket."""
CLIENT = f"{MOUNT}/client"
_VOLUME = "gpumem"
# The API server asks before it checks the limits of a pod, whose author would otherwise choose the length of the
# answer: the names in the annotation that count, the reasons that are shown, the containers, the name of a volume.
_NAMES = 64
_REASONS = 8
_CONTAINERS = 256
_VOLUME_NAME_CHARACTERS = 63
# All annotations of a pod have 256 KiB together. With more, the API server refuses the pod.
_RESULT_CHARACTERS = 2000

Object: TypeAlias = Mapping[str, Any]


@dataclass(slots=True)
class Injection:
    """What happens to a pod."""

    operations: list[dict[str, Any]] = field(default_factory=list)
    """The JSON patch."""
    injected: list[str] = field(default_factory=list)
    """The containers with the client, including the containers that had it before."""
    reasons: list[str] = field(default_factory=list)
    """Why the pod, or a container, does not get the client."""

    def describe(self) -> str:
        """Return one line for people; empty if the webhook does not handle the pod."""
        return "; ".join([*(f"injected: {name}" for name in self.injected), *self.shown_reasons])[:_RESULT_CHARACTERS]

    @property
    def shown_reasons(self) -> list[str]:
        """The first reasons, and how many there are besides."""
        left = len(self.reasons) - _REASONS
        return [*self.reasons[:_REASONS], *([f"and {left} more"] if left > 0 else [])]


def inject(pod: Object, *, host_path: str = MOUNT, forbidden: str = "") -> Injection:
    """Return the changes to a pod. The caller has found that the pod or its namespace has the label.

    `host_path` is the exporter's folder on the node. `forbidden` is the reason why no pod of the namespace may mount
    it, or empty.
    """
    metadata, spec = pod["metadata"], pod["spec"]
    result = Injection()
    label = (metadata.get("labels") or {}).get(LABEL)
    # A mirror pod only shows what the kubelet runs: a change has no effect.
    if label not in (None, "true") or "kubernetes.io/config.mirror" in (metadata.get("annotations") or {}):
        return result
    containers = list(_chosen(pod, result))
    if len(containers) > _CONTAINERS:
        result.reasons.append(f"not injected: {len(containers)} containers would change, and at most {_CONTAINERS} may")
    elif not containers:
        if label == "true" and not result.reasons:
            result.reasons.append(f"not injected: no container requests an NVIDIA GPU; name them in {CONTAINERS}")
    elif reason := forbidden or _pod_conflict(spec):
        result.reasons.append(f"not injected: {reason}")
    else:
        _inject_into(containers, pod, host_path, result)
    _annotate(metadata, result)
    return result


def _chosen(pod: Object, result: Injection) -> Iterator[tuple[str, Object]]:
    """Yield the containers to change, with their JSON pointers: init containers and sidecars, too."""
    wanted = (pod["metadata"].get("annotations") or {}).get(CONTAINERS)
    names = None if wanted is None else {name.strip() for name in wanted.split(",", _NAMES)[:_NAMES]} - {""}
    found = set()
    for key in ("initContainers", "containers"):
        for index, container in enumerate(pod["spec"].get(key) or ()):
            found.add(container["name"])
            if _requests_gpu(container) if names is None else not names.isdisjoint(("*", container["name"])):
                yield f"/spec/{key}/{index}", container
    for name in sorted((names or set()) - found - {"*"}):
        result.reasons.append(f"no container {name[:63]!r}, which {CONTAINERS} names")


def _requests_gpu(container: Object) -> bool:
    resources = container.get("resources") or {}
    amounts = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
    # The names of GPUs are settings of NVIDIA's device plugin: nvidia.com/gpu, gpu.shared, mig-1g.10gb and others. The
    # device of a claim is unknown here. A Python process without CUDA spends one to two milliseconds on the client.
    return bool(resources.get("claims")) or any(
        name.startswith("nvidia.com/") and str(amount) != "0" for name, amount in amounts.items()
    )


def _pod_conflict(spec: Object) -> str:
    """Return why no container of a pod can report; empty if they can."""
    if "windows" in ((spec.get("os") or {}).get("name"), (spec.get("nodeSelector") or {}).get("kubernetes.io/os")):
        return "the pod is for Windows"
    if spec.get("hostUsers") is False:
        # In a user namespace without the users of the host, the kernel shows all of them as the user 65534.
        return "with hostUsers: false, the client cannot verify whose process the exporter is"
    return ""


def _inject_into(containers: Sequence[tuple[str, Object]], pod: Object, host_path: str, result: Injection) -> None:
    volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes") or ()}
    named = (name for name, volume in volumes.items() if _path_of_host(volume) == host_path)
    own = next((name for name in named if len(name) <= _VOLUME_NAME_CHARACTERS), None)
    volume_name = own or _free_name(volumes)
    variables = default_names(pod["metadata"])
    changes: list[dict[str, Any]] = []
    for pointer, container in containers:
        if reason := _conflict(container, volumes, own):
            result.reasons.append(f"not injected: {container['name']}: {reason}")
            continue
        result.injected.append(container["name"])
        if not any(_absolute(mount["mountPath"]) == MOUNT for mount in container.get("volumeMounts") or ()):
            # Connecting to a socket needs no writable mount.
            mount = {"name": volume_name, "mountPath": MOUNT, "readOnly": True}
            changes += _appended(container, pointer, "volumeMounts", [mount])
        changes += _variables(container, pointer, {"PYTHONPATH": {"value": _python_path(container)}, **variables})
    if result.injected and own is None:
        # A node without an exporter gets an empty folder. With any other type, the pod would not start there.
        volume = {"name": volume_name, "hostPath": {"path": host_path, "type": "DirectoryOrCreate"}}
        changes = [*_appended(pod["spec"], "/spec", "volumes", [volume]), *changes]
    result.operations += changes


def _path_of_host(volume: Object) -> str | None:
    path = (volume.get("hostPath") or {}).get("path")
    return posixpath.normpath(path) if path else None


def _free_name(taken: Mapping[str, Object]) -> str:
    names = (_VOLUME, *(f"{_VOLUME}-{number}" for number in range(2, len(taken) + 3)))
    return next(name for name in names if name not in taken)


def _conflict(container: Object, volumes: Mapping[str, Object], own: str | None) -> str:
    """Return why a container cannot get the client; empty if it can, or has it."""
    for mount in container.get("volumeMounts") or ():
        path = _absolute(mount["mountPath"])
        if path == MOUNT:
            # For instance the folder of an exporter in the same pod, to which the container shall report.
            if mount["name"] != own or mount.get("subPath") or mount.get("subPathExpr"):
                return f"it mounts another volume at {MOUNT}"
        elif path.startswith(f"{MOUNT}/"):
            return f"it mounts a volume below {MOUNT}"
        elif f"{MOUNT}/".startswith(f"{path.rstrip('/')}/") and not _is_writable(mount, volumes):
            return f"it mounts a volume at {path}, in which {MOUNT} cannot be created"
    given = _last(container, "PYTHONPATH")
    if given and given[1].get("valueFrom"):
        return "its PYTHONPATH has a valueFrom, to which nothing can be added"
    return ""


def _is_writable(mount: Object, volumes: Mapping[str, Object]) -> bool:
    """Return whether the runtime can create a mount point in a volume, and the volume is the pod's own."""
    return "emptyDir" in volumes.get(mount["name"], ()) and not mount.get("readOnly")


def _absolute(path: str) -> str:
    """Return a normal form of the path of a mount."""
    # Most images have /var/run as a link to /run.
    path = posixpath.normpath(f"/{path.lstrip('/')}")
    return path.removeprefix("/var") if f"{path}/".startswith("/var/run/") else path


def _last(container: Object, name: str) -> tuple[int, Object] | None:
    """Return the definition of a variable that is in force, with its index: the last one."""
    named = [(index, each) for index, each in enumerate(container.get("env") or ()) if each["name"] == name]
    return named[-1] if named else None


def _python_path(container: Object) -> str:
    given = _last(container, "PYTHONPATH")
    if given is None:
        # The kubelet replaces the reference by the PYTHONPATH of envFrom. Without one, it leaves the text, which is the
        # name of no folder.
        return f"{CLIENT}:$(PYTHONPATH)" if container.get("envFrom") else CLIENT
    value: str = given[1].get("value") or ""
    # An empty PYTHONPATH has no entry, but an empty entry is the working directory.
    return value if CLIENT in value.split(":") else f"{CLIENT}:{value}" if value else CLIENT


def _variables(container: Object, pointer: str, wanted: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    operations, added = [], []
    for name, source in wanted.items():
        variable, given = {"name": name, **source}, _last(container, name)
        if given is None:
            added.append(variable)
        elif given[1] != variable:
            operations.append({"op": "replace", "path": f"{pointer}/env/{given[0]}", "value": variable})
    return [*operations, *_appended(container, pointer, "env", added)]


def _appended(owner: Object, pointer: str, key: str, items: Sequence[Object]) -> list[dict[str, Any]]:
    """Return the operations that append to a list, which may be missing."""
    if not items:
        return []
    if not owner.get(key):
        return [{"op": "add", "path": f"{pointer}/{key}", "value": list(items)}]
    return [{"op": "add", "path": f"{pointer}/{key}/-", "value": item} for item in items]


def _annotate(metadata: Object, result: Injection) -> None:
    text = result.describe()
    annotations = metadata.get("annotations") or {}
    if not text or annotations.get(RESULT) == text:
        return
    added: dict[str, Any]
    if annotations:
        added = {"op": "add", "path": f"/metadata/annotations/{RESULT.replace('/', '~1')}", "value": text}
    else:
        added = {"op": "add", "path": "/metadata/annotations", "value": {RESULT: text}}
    result.operations.append(added)
