"""The inference engine in this process, whichever it is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from gpumem_client.engines.engine_state import EngineFacts, unknown
from gpumem_client.hooks.process_life import loading, process_singleton

if TYPE_CHECKING:
    from gpumem_client.engines.sglang import Sglang
    from gpumem_client.engines.sleep import CoreMemory
    from gpumem_client.engines.vllm import Vllm


class EngineReader:
    """Reads the engine's objects. One thread calls `look`; any thread may call the other methods.

    The code that reads an engine is loaded by the first `look` at which the process has imported that engine. The other
    methods load nothing, because they also run in the thread in which an out-of-memory error happens.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._vllm: Vllm | None = None
        self._sglang: Sglang | None = None

    def look(self) -> None:
        """Search the engine's objects and take its slower counts, as far as their share of a core allows."""
        with unknown("how to read an inference engine"):
            self._load()
        for engine in self._known():
            with unknown("the objects of an inference engine"):
                engine.look()

    def read(self) -> EngineFacts | None:
        """Return what is known about the engine now; None if there is none, or if it was not found."""
        for engine in self._known():
            with unknown("the state of an inference engine"):
                facts = engine.read()
                if facts is not None:
                    return facts
        return None

    def memory(self) -> CoreMemory | None:
        """Return the memory of the engine if this process can release and resume it; otherwise None."""
        with unknown("the sleep mode of an inference engine"):
            return None if self._vllm is None else self._vllm.memory()
        return None

    def segment_components(self) -> Mapping[int, str]:
        """Return the component of each segment of the engine's own pools, by the segment's address."""
        with unknown("the tags of sleep mode"):
            return {} if self._vllm is None else self._vllm.segment_components()
        return {}

    def _load(self) -> None:
        if self._vllm is None and "vllm" in sys.modules:
            with loading():
                from gpumem_client.engines.vllm import Vllm
            self._vllm = Vllm(self._clock)
        if self._sglang is None and "sglang" in sys.modules:
            with loading():
                from gpumem_client.engines.sglang import Sglang
            self._sglang = Sglang(self._clock)

    def _known(self) -> list[Vllm | Sglang]:
        return [engine for engine in (self._vllm, self._sglang) if engine is not None]


def process_engine() -> EngineReader:
    """Return the reader of this process."""
    return process_singleton("engine", EngineReader)
