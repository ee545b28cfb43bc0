"""llama.cpp's router, which runs a process for each model.

Source: ggml-org/llama.cpp, tools/server/README.md and tools/server/server-models.cpp. The router names the model of a
process with `--alias`, and gives it a port of loopback without a key. An unload ends the process and its requests; a
request for the model loads it again.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping

from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_exporter.actions.engines import Activity, EngineRefusedError
from gpumem_exporter.engines.adapter import QUESTION_SECONDS, Engine, not_enabled


class LlamaCpp(Engine):
    """A model of llama.cpp's router."""

    name = "llama.cpp"
    titles = ("llama-server", "llama serve")
    port = 8080
    alone = True

    def authorize(self) -> Mapping[str, str]:
        """Return the key of the command line or the environment of the router."""
        keys = self.program.option("--api-key") or self.program.variable("LLAMA_API_KEY")
        return {"Authorization": f"Bearer {keys.partition(',')[0]}"} if keys else {}

    def activity(self) -> Activity:
        """Return the number of slots that process a request, from the process of the model."""
        if self.program.pid == self.worker.pid:
            raise not_enabled("llama.cpp releases memory in router mode only: start llama-server without -m")
        port = self.worker.option("--port")
        own = next((each for each in self.worker.listeners if str(each.address[1]) == port), None)
        requests = None
        if own is not None:
            answer = self.exchange("GET", "/slots", None, QUESTION_SECONDS, {}, listener=own)
            with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                if answer.status == 200:
                    requests = sum(slot["is_processing"] is not False for slot in json.loads(answer.body))
        return Activity(asleep=False, requests=requests)

    def release(self, keep: str | None, _force: bool, /) -> None:
        """Unload the model; its process exits."""
        if keep:
            raise not_enabled("llama.cpp ends the whole process of a model and cannot keep its weights")
        model = self.worker.option("--alias", "-a")
        if not model:
            raise EngineRefusedError(ReasonCode.NO_ENGINE, f"pid {self.worker.pid} has no model of a router")
        self.post("/models/unload", {"model": model}, flag="a router: llama-server without -m")

    def resume(self) -> None:
        """Refuse: the process that held the model has exited."""
        raise EngineRefusedError(ReasonCode.ENGINE_AWAKE, "llama.cpp loads a model again with its next request")
