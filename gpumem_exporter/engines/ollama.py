"""Ollama, one model for each process on the device.

Source: ollama/ollama, docs/api.md and server/sched.go. A model with `keep_alive` 0 is unloaded when its last request
has ended, and its process exits. An empty generate loads a model, and so does any request for it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_exporter.actions.engines import Activity, EngineRefusedError
from gpumem_exporter.engines.adapter import QUESTION_SECONDS, Server, document, expect

_UNLOAD_SECONDS = 30.0
_LOOK_SECONDS = 0.25
_MAX_MODELS = 16


class Ollama:
    """A model of an Ollama server."""

    name = "Ollama"
    titles: tuple[str, ...] = ("ollama",)
    port = 11434
    workers: tuple[str, ...] = ()
    alone = True

    def authorize(self, _server: Server) -> Mapping[str, str]:
        """Return no header: the server has no keys."""
        return {}

    def activity(self, server: Server) -> Activity:
        """Return that the model is loaded. The server itself waits for the requests, whose number does not matter."""
        _model_of(server)
        return Activity(asleep=False, requests=0)

    def release(self, server: Server, keep: str | None, _force: bool) -> None:
        """Unload the model, and wait until it is gone."""
        if keep:
            reason = "Ollama unloads the whole model and cannot keep its weights"
            raise EngineRefusedError(ReasonCode.ENGINE_NOT_ENABLED, reason, outcome="unsupported")
        model, path = _model_of(server), "/api/generate"
        expect(server, server.post(path, {"model": model, "keep_alive": 0, "stream": False}), path)
        end = time.monotonic() + _UNLOAD_SECONDS
        while model in _loaded(server):
            if time.monotonic() >= end:
                reason = f"Ollama unloads {model} when its requests have ended; it had some for {_UNLOAD_SECONDS:g} s"
                raise EngineRefusedError(ReasonCode.ENGINE_BUSY, reason)
            time.sleep(_LOOK_SECONDS)

    def resume(self, _server: Server) -> None:
        """Refuse: the process that held the model has exited."""
        raise EngineRefusedError(ReasonCode.ENGINE_AWAKE, "Ollama loads a model again with its next request")


def _loaded(server: Server) -> list[str]:
    path = "/api/ps"
    models = document(server, expect(server, server.get(path), path), path).get("models")
    names = [model.get("model") for model in models if isinstance(model, dict)] if isinstance(models, list) else []
    return [name for name in names if isinstance(name, str) and name][:_MAX_MODELS]


def _model_of(server: Server) -> str:
    """Return the loaded model whose file is on the command line of the process on the device."""
    loaded, path = _loaded(server), "/api/show"
    file = server.worker.option("--model")
    for model in loaded:
        shown = server.post(path, {"model": model}, seconds=QUESTION_SECONDS)
        described = document(server, expect(server, shown, path), path).get("modelfile")
        if file and isinstance(described, str) and file in described:
            return model
    reason = f"Ollama has loaded {', '.join(loaded) or 'no model'}, and none is the model of pid {server.worker.pid}"
    raise EngineRefusedError(ReasonCode.NO_ENGINE, reason[:500])
