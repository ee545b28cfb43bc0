"""The devices of the node: those that the driver lists, and lost devices that it no longer identifies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gpumem_exporter.nvml.provider import DeviceIdentity


class DeviceRegistry:
    """Keeps the identity of lost devices, so that a lost device differs from a removed one. Not thread-safe.

    The driver may not return the UUID of a GPU that fell off the bus, and may not count the GPU after NVML is
    initialized again. A device that disappears without an earlier error was removed: a GPU was unbound, or a MIG
    instance was destroyed.
    """

    def __init__(self) -> None:
        self._known: dict[str, DeviceIdentity] = {}
        self._lost: dict[str, DeviceIdentity] = {}

    def merge(self, listed: Sequence[DeviceIdentity]) -> tuple[DeviceIdentity, ...]:
        """Return the listed devices, completed from earlier calls, and the lost devices that the driver leaves out.

        The driver may assign the index of a lost device to another device. The lost device then has no index, because
        an action for that index must have one target.
        """
        identified = {identity.uuid for identity in listed if identity.uuid}
        merged: list[DeviceIdentity] = []
        for identity in listed:
            if identity.uuid:
                merged.append(identity)
                continue
            remembered = [
                replace(known, error=identity.error)
                for known in self._known.values()
                if known.uuid not in identified and _is_or_is_part_of(known.gpu, identity.gpu)
            ]
            merged.extend(remembered or [identity])
        present = {identity.uuid for identity in merged}
        taken = {_gpu_of(identity) for identity in merged}
        left_out = [lost for uuid, lost in self._lost.items() if uuid not in present]
        self._known = {identity.uuid: identity for identity in (*merged, *left_out) if identity.uuid}
        return (*merged, *(replace(lost, gpu="") if _gpu_of(lost) in taken else lost for lost in left_out))

    def note_errors(self, errors: Mapping[str, str]) -> None:
        """Record which merged devices are lost: listed with an error, or not readable for a reason in `errors`.

        A MIG device that cannot be read may have been destroyed, so it is lost only together with its GPU.
        """
        self._lost = {}
        for uuid, identity in self._known.items():
            error = identity.error or ("" if identity.parent_uuid else errors.get(uuid, ""))
            if error:
                self._lost[uuid] = replace(identity, error=error)


def _gpu_of(identity: DeviceIdentity) -> str:
    """Return the index of the GPU, for a MIG device that of its parent."""
    return identity.gpu.partition(":")[0]


def _is_or_is_part_of(gpu: str, other: str) -> bool:
    return gpu == other or gpu.startswith(f"{other}:")
