"""Which devices there are: what the driver lists now, and what it no longer knows by name since it lost it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gpumem_exporter.nvml.provider import DeviceIdentity

__all__ = ["Roster"]


class Roster:
    """Gives lost devices back their identity, so that a device in trouble is told apart from one that is not there.

    A GPU that fell off the bus may no longer say its UUID; the driver may not even count it once it was initialised
    again. A device that goes without having been in trouble (a GPU unbound, a MIG instance destroyed) is gone.
    One thread uses it.
    """

    def __init__(self) -> None:
        self._known: dict[str, DeviceIdentity] = {}
        self._lost: dict[str, DeviceIdentity] = {}

    def merge(self, listed: Sequence[DeviceIdentity]) -> tuple[DeviceIdentity, ...]:
        """All devices: those listed, with names where the driver has none, and the lost ones that it leaves out.

        The driver counts anew without those. A lost one whose index is another's now has none: an action for that index
        must not mean both.
        """
        named = {identity.uuid for identity in listed if identity.uuid}
        merged: list[DeviceIdentity] = []
        for identity in listed:
            if identity.uuid:
                merged.append(identity)
                continue
            remembered = [
                replace(known, error=identity.error)
                for known in self._known.values()
                if known.uuid not in named and _is_or_is_part_of(known.gpu, identity.gpu)
            ]
            merged.extend(remembered or [identity])
        present = {identity.uuid for identity in merged}
        taken = {_gpu_of(identity) for identity in merged}
        left_out = [lost for uuid, lost in self._lost.items() if uuid not in present]
        self._known = {identity.uuid: identity for identity in (*merged, *left_out) if identity.uuid}
        return (*merged, *(replace(lost, gpu="") if _gpu_of(lost) in taken else lost for lost in left_out))

    def note_errors(self, errors: Mapping[str, str]) -> None:
        """Remember which of the devices just merged are lost: those listed with an error, and those in `errors`.

        Args:
            errors: why a device that was listed could not be read, by uuid. A MIG device that cannot be read may just
                have been destroyed, so it is lost only together with its GPU.
        """
        self._lost = {}
        for uuid, identity in self._known.items():
            error = identity.error or ("" if identity.parent_uuid else errors.get(uuid, ""))
            if error:
                self._lost[uuid] = replace(identity, error=error)


def _gpu_of(identity: DeviceIdentity) -> str:
    """The index of the GPU that it is, or is a part of."""
    return identity.gpu.partition(":")[0]


def _is_or_is_part_of(gpu: str, other: str) -> bool:
    return gpu == other or gpu.startswith(f"{other}:")
