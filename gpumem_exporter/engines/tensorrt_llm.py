"""TensorRT-LLM (PyTorch backend).

Source: NVIDIA/TensorRT-LLM docs/source/features/sleep-wakeup.md (prototype). The routes exist with
`--enable_sleep_mode` and require an HMAC of each request, whose key is in the environment of the server. A release
closes the admission of requests and waits until the requests in flight have ended.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Mapping
from typing import Any

from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_exporter.actions.engines import Activity, EngineRefusedError
from gpumem_exporter.engines.adapter import CHANGE_SECONDS, QUESTION_SECONDS, Engine

_KEY = "TRTLLM_RUNTIME_CONTROL_API_KEY"
_FLAGS = f"--enable_sleep_mode and {_KEY} in its environment"
_HEADER = "x-trtllm-runtime-control"


class TensorRtLlm(Engine):
    """An engine of TensorRT-LLM."""

    name = "TensorRT-LLM"
    titles = ("trtllm",)
    port = 8000

    def activity(self) -> Activity:
        """Return whether memory is parked. A release drains the requests, so their number does not matter."""
        state = self._signed("GET", "/memory_status").get("state")
        if state not in ("running", "parked"):
            raise EngineRefusedError(ReasonCode.ENGINE_BUSY, f"the state of TensorRT-LLM is {str(state)[:40]!r}")
        return Activity(state == "parked", 0)

    def release(self, keep: str | None, _force: bool, /) -> None:
        """Park all memory, or with `keep` the key-value cache only."""
        self._signed("POST", "/release_memory", {"tags": ["kv_cache"]} if keep else {})

    def resume(self) -> None:
        """Restore all parked memory."""
        self._signed("POST", "/resume_memory", {})

    def _signed(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send a signed request, and return the object of the answer."""
        key = self.program.variable(_KEY)
        if not key:
            reason = (
                f"the exporter cannot read the key of TensorRT-LLM; start it with {_FLAGS}, or let the exporter read it"
            )
            raise EngineRefusedError(ReasonCode.ENGINE_DENIED, reason)
        content = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
        timestamp, nonce = str(int(time.time())), secrets.token_hex(16)
        signed = "\n".join(["trtllm-runtime-control-v1", method, path, timestamp, nonce, ""]).encode() + content
        headers = {
            "Content-Type": "application/json",
            f"{_HEADER}-auth": f"sha256={hmac.new(key.encode(), signed, hashlib.sha256).hexdigest()}",
            f"{_HEADER}-timestamp": timestamp,
            f"{_HEADER}-nonce": nonce,
        }
        seconds = QUESTION_SECONDS if body is None else CHANGE_SECONDS
        answer = self.exchange(method, path, None if body is None else content, seconds, headers)
        return self.document(self.expect(answer, path, _FLAGS), path)
