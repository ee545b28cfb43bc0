"""Ollama, one model for each process on the device.

Source: ollama/ollama, docs/api.md and server/sched.go. A model with `keep_alive` 0 is unloaded when its last request
has ended, and its process exits. An empty generate loads a model, and so does any request for it.
"""

from __future__ import annotations

import time

from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_exporter.actions.engines import Activity, EngineRefusedError
from gpumem_exporter.engines.adapter import QUESTION_SECONDS, Engine, not_enabled

_UNLOAD_SECONDS = 30.0
_LOOK_SECONDS = 0.25
_MAX_MODELS = 16


class Ollama(Engine):
    """A model of an Ollama server."""

    name = "Ollama"
    titles = ("ollama",)
    port = 11434
    alone = True

    def activity(self) -> Activity:
        """Return that the model is loaded. The server itself waits for the requests, whose number does not matter."""
        self._model()
        return Activity(asleep=False, requests=0)

    def release(self, keep: str | None, _force: bool, /) -> None:
        """Unload the model, and wait until it is gone."""
        if keep:
            raise not_enabled("Ollama unloads the whole model and cannot keep its weights")
        model = self._model()
        self.post("/api/generate", {"model": model, "keep_alive": 0, "stream": False})
        end = time.monotonic() + _UNLOAD_SECONDS
        while model in self._loaded():
            if time.monotonic() >= end:
                reason = f"Ollama unloads {model} when its requests have ended; it had some for {_UNLOAD_SECONDS:g} s"
                raise EngineRefusedError(ReasonCode.ENGINE_BUSY, reason)
            time.sleep(_LOOK_SECONDS)

    def resume(self) -> None:
        """Refuse: the process that held the model has exited."""
        raise EngineRefusedError(ReasonCode.ENGINE_AWAKE, "Ollama loads a model again with its next request")

    def _loaded(self) -> list[str]:
        path = "/api/ps"
        models = self.document(self.get(path), path).get("models")
        names = [model.get("model") for model in models if isinstance(model, dict)] if isinstance(models, list) else []
        return [name for name in names if isinstance(name, str) and name][:_MAX_MODELS]

    def _model(self) -> str:
        """Return the loaded model whose file is on the command line of the process on the device."""
        loaded, path, file = self._loaded(), "/api/show", self.worker.option("--model")
        for model in loaded:
            shown = self.post(path, {"model": model}, seconds=QUESTION_SECONDS)
            described = self.document(shown, path).get("modelfile")
            if file and isinstance(described, str) and file in described:
                return model
        reason = f"Ollama has loaded {', '.join(loaded) or 'no model'}, and none is the model of pid {self.worker.pid}"
        raise EngineRefusedError(ReasonCode.NO_ENGINE, reason)
