"""llama.cpp's router, which runs a process for each model.

Source: ggml-org/llama.cpp, tools/server/README.md and tools/server/server-models.cpp. The router names the model of a
process with `--alias`, and gives it a port of loopback without a key. An unload ends the process and its requests; a
request for the model loads it again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_exporter.actions.engines import Activity, EngineRefusedError
from gpumem_exporter.engines.adapter import Server, expect


class LlamaCpp:
    """A model of llama.cpp's router."""

    name = "llama.cpp"
    titles: tuple[str, ...] = ("llama-server", "llama serve")
    port = 8080
    workers: tuple[str, ...] = ()
    alone = True

    def authorize(self, server: Server) -> Mapping[str, str]:
        """Return the key of the command line or the environment of the router."""
        keys = server.program.option("--api-key") or server.program.variable("LLAMA_API_KEY")
        return {"Authorization": f"Bearer {keys.partition(',')[0]}"} if keys else {}

    def activity(self, server: Server) -> Activity:
        """Return the number of slots that process a request, from the process of the model."""
        if server.program.pid == server.worker.pid:
            reason = "llama.cpp releases memory in router mode only: start llama-server without -m"
            raise EngineRefusedError(ReasonCode.ENGINE_NOT_ENABLED, reason, outcome="unsupported")
        port = server.worker.option("--port")
        own = next((each for each in server.worker.listeners if str(each.address[1]) == port), None)
        if own is None:
            return Activity(asleep=False, requests=None)
        answer = replace(server, program=server.worker, listener=own, headers={}).get("/slots")
        if answer.status != 200:
            return Activity(asleep=False, requests=None)
        try:
            slots = json.loads(answer.body)
            return Activity(asleep=False, requests=sum(slot["is_processing"] is not False for slot in slots))
        except (ValueError, KeyError, TypeError, RecursionError):
            return Activity(asleep=False, requests=None)

    def release(self, server: Server, keep: str | None, _force: bool) -> None:
        """Unload the model; its process exits."""
        if keep:
            reason = "llama.cpp ends the whole process of a model and cannot keep its weights"
            raise EngineRefusedError(ReasonCode.ENGINE_NOT_ENABLED, reason, outcome="unsupported")
        model, path = server.worker.option("--alias", "-a"), "/models/unload"
        if not model:
            raise EngineRefusedError(ReasonCode.NO_ENGINE, f"pid {server.worker.pid} has no model of a router")
        expect(server, server.post(path, {"model": model}), path, flag="a router: llama-server without -m")

    def resume(self, _server: Server) -> None:
        """Refuse: the process that held the model has exited."""
        raise EngineRefusedError(ReasonCode.ENGINE_AWAKE, "llama.cpp loads a model again with its next request")
