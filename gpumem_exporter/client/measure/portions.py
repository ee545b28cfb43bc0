"""What portions of a model's tensors lie in, kept from one count to the next, as long as it can be seen to hold.

To measure a tensor takes a dozen calls of PyTorch, to see that it lies where it lay takes two: its storage is the same
object, and as large as it was. No shorter way is right. An address says less: it may be another storage's by now. And
that the tensor is the same object says nothing of its memory: `.data` may have been set, to the host's memory and back.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from gpumem_exporter.client.hooks.guest_safety import raised_by_signal_handler
from gpumem_exporter.client.measure.model_structure import Structure
from gpumem_exporter.client.measure.tensor_bytes import Storages, plain

__all__ = ["Portion", "Portions"]


class Portion:
    """The storages of some tensors, as they were measured.

    It holds no tensor and no storage, and hears of a storage's end. PyTorch gives a storage the same Python object as
    long as it lives; where it does not (before 2.2), no portion ever holds.

    Args:
        tensors: of any kind.
        torch: the program's.
    """

    __slots__ = ("_gone", "_likeness", "_references", "_torch", "storages")

    def __init__(self, tensors: list[Any], torch: Any) -> None:
        self._torch = torch
        self.storages = Storages(torch)
        self.storages.add(tensors)
        self._gone: list[weakref.ref[Any]] = []
        self._references: list[weakref.ref[Any]] = []
        self._likeness: tuple[int, list[int]] | None = None
        try:
            storages = _storages(tensors, torch)
            self._references = [weakref.ref(storage, self._gone.append) for storage in {*storages}]
            self._likeness = _likeness(storages)
        except Exception as error:  # some of them are of another kind: they are measured each time
            if raised_by_signal_handler(error):
                raise

    def holds(self, tensors: list[Any]) -> bool:
        """Whether these tensors lie in just these storages, and those are as large as they were.

        The identities of storages can be compared because none of those that were measured has gone since.
        """
        if self._likeness is None or self._gone:
            return False
        try:
            storages = _storages(tensors, self._torch)
        except Exception as error:  # some of them are of another kind now
            if raised_by_signal_handler(error):
                raise
            return False
        return self._likeness == _likeness(storages) and not self._gone


class Portions:
    """The portions of one model and its optimizer. One thread at a time.

    Args:
        torch: the program's.
    """

    def __init__(self, torch: Any) -> None:
        self.structure: Structure | None = None
        """What the portions of the parameters are taken from."""
        self._torch = torch
        self._known: dict[tuple[str, int], Portion] = {}
        self._summed: list[list[Portion]] = []
        self._sums: tuple[Mapping[int, int], Mapping[int, int]] = {}, {}

    def take(self, kind: str, place: int, tensors: list[Any]) -> Portion:
        """The portion of that place among those of its kind: what is known of it where that holds, else measured."""
        portion = self._known.get((kind, place))
        if portion is None or not portion.holds(tensors):
            portion = self._known[kind, place] = Portion(tensors, self._torch)
        return portion

    def bytes(self, parameters: list[Portion], states: list[Portion]) -> tuple[Mapping[int, int], Mapping[int, int]]:
        """Bytes by device of a whole count's portions: each storage once, and none both as a parameter's and a state's.

        What is known of other places is forgotten.
        """
        if [parameters, states] != self._summed:
            of_parameters, of_states = Storages(self._torch), Storages(self._torch)
            for all_of_them, portions in (of_parameters, parameters), (of_states, states):
                for portion in portions:
                    all_of_them.update(portion.storages)
            self._summed = [parameters, states]
            self._sums = of_parameters.bytes(), of_states.bytes(of_parameters)
            used = {id(portion) for portion in (*parameters, *states)}
            self._known = {key: portion for key, portion in self._known.items() if id(portion) in used}
        return self._sums


def _storages(tensors: list[Any], torch: Any) -> list[Any]:
    return list(map(torch.Tensor.untyped_storage, plain(tensors, torch)))


def _likeness(storages: list[Any]) -> tuple[int, list[int]]:
    """What two lists of living storages have in common only if they are the same ones, as large as they were.

    A storage has the hash of its identity, and a tuple one of all of theirs in their order.
    """
    return hash(tuple(storages)), list(map(len, storages))
