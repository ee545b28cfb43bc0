"""The inference engine in this process, whichever it is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from gpumem_client.engines.engine_state import EngineFacts, known
from gpumem_client.hooks.process_life import loading, process_singleton

if TYPE_CHECKING:
    from gpumem_client.engines.sleep import CoreMemory


class EngineReader:
    """Reads the engine's objects. One thread calls `look`; any thread may call the other methods.

    The code that reads an engine is loaded by the first `look` at which the process has imported that engine. The other
    methods load nothing, because they also run in the thread in which an out-of-memory error happens.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._engines: dict[str, Any] = {}

    def look(self) -> None:
        """Search the engine's objects and take its slower counts, as far as their share of a core allows."""
        known("how to read an inference engine", self._load, None)
        for engine in self._engines.values():
            known("the objects of an inference engine", engine.look, None)

    def read(self) -> EngineFacts | None:
        """Return what is known about the engine now; None if there is none, or if it was not found."""
        for engine in list(self._engines.values()):
            facts: EngineFacts | None = known("the state of an inference engine", engine.read, None)
            if facts is not None:
                return facts
        return None

    def memory(self) -> CoreMemory | None:
        """Return the memory of the engine if this process can release and resume it; otherwise None."""
        vllm = self._engines.get("vllm")
        return None if vllm is None else known("the sleep mode of an inference engine", vllm.memory, None)

    def segment_components(self) -> Mapping[int, str]:
        """Return the component of each segment of the engine's own pools, by the segment's address."""
        vllm = self._engines.get("vllm")
        return {} if vllm is None else known("the tags of sleep mode", vllm.segment_components, {})

    def _load(self) -> None:
        if "vllm" in sys.modules and "vllm" not in self._engines:
            with loading():
                from gpumem_client.engines.vllm import Vllm
            self._engines["vllm"] = Vllm(self._clock)
        if "sglang" in sys.modules and "sglang" not in self._engines:
            with loading():
                from gpumem_client.engines.sglang import Sglang
            self._engines["sglang"] = Sglang(self._clock)


def process_engine() -> EngineReader:
    """Return the reader of this process."""
    return process_singleton("engine", EngineReader)
