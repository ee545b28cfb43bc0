"""The inference engine in this process, whichever it is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping

from gpumem_client.engines.engine_state import EngineFacts, unknown
from gpumem_client.engines.sglang import Sglang
from gpumem_client.engines.sleep import CoreMemory
from gpumem_client.engines.vllm import Vllm
from gpumem_client.hooks.lifecycle import process_singleton


class EngineReader:
    """Reads the engine's objects. One thread calls `look`; any thread may call the other methods."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._vllm = Vllm(clock)
        self._engines: dict[str, Vllm | Sglang] = {"vllm": self._vllm, "sglang": Sglang(clock)}

    def look(self) -> None:
        """Search the engine's objects and take its slower counts, as far as their share of a core allows."""
        for engine in self._loaded():
            with unknown("the objects of an inference engine"):
                engine.look()

    def read(self) -> EngineFacts | None:
        """Return what is known about the engine now; None if there is none, or if it was not found."""
        for engine in self._loaded():
            with unknown("the state of an inference engine"):
                facts = engine.read()
                if facts is not None:
                    return facts
        return None

    def memory(self) -> CoreMemory | None:
        """Return the memory of the engine if this process can release and resume it; otherwise None."""
        with unknown("the sleep mode of an inference engine"):
            core = self._vllm.core()
            return CoreMemory(core) if core is not None and CoreMemory.is_supported(core) else None
        return None

    def segment_components(self) -> Mapping[int, str]:
        """Return the component of each segment of the engine's own pools, by the segment's address."""
        with unknown("the tags of sleep mode"):
            return self._vllm.segment_components()
        return {}

    def _loaded(self) -> list[Vllm | Sglang]:
        return [engine for module, engine in self._engines.items() if module in sys.modules]


def process_engine() -> EngineReader:
    """Return the reader of this process."""
    return process_singleton("engine", EngineReader)
