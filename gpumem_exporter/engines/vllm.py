"""vLLM through its development routes, for servers whose process does not report or that have several workers.

Source: vllm 0.32.0, vllm/entrypoints/serve/dev/sleep/api_router.py and vllm/v1/metrics/loggers.py. The routes exist
with VLLM_SERVER_DEV_MODE=1 only, and have no authentication of their own.
"""

from __future__ import annotations

import contextlib

from gpumem_exporter.actions.engines import Activity, EngineRefusedError
from gpumem_exporter.engines.adapter import Engine, not_enabled, sum_of_metrics, values_of_metric

_FLAGS = (
    "--enable-sleep-mode and VLLM_SERVER_DEV_MODE=1, or with --enable-sleep-mode below gpumem-run, which needs no "
    "development mode for an engine on one GPU"
)
_METRICS_SECONDS = 1.0
_REQUESTS = ("vllm:num_requests_running", "vllm:num_requests_waiting")


class Vllm(Engine):
    """An engine of vLLM."""

    name = "vLLM"
    titles = ("VLLM::", "vllm")
    port = 8000
    workers = ("VLLM::EngineCore", "VLLM::Worker")

    def activity(self) -> Activity:
        """Return whether the engine sleeps, and its requests from its own metrics."""
        argv, path = self.program.argv, "/is_sleeping"
        if "--port" in argv and not {"--enable-sleep-mode", "--enable_sleep_mode", "--config"} & set(argv):
            raise not_enabled(f"vLLM: it was started without {_FLAGS}")
        asleep = self.document(self.get(path, flag=_FLAGS), path).get("is_sleeping")
        if not isinstance(asleep, bool):
            raise self.failed("does not say whether it sleeps")
        return Activity(asleep, sum_of_metrics(self.get("/metrics").body, _REQUESTS))

    def cache_use(self) -> float | None:
        """Return the part of the key-value cache that requests use; None with several engines behind the port."""
        answer = self.exchange("GET", "/metrics", None, _METRICS_SECONDS, {})
        values = values_of_metric(self.expect(answer, "/metrics").body, "vllm:kv_cache_usage_perc")
        return values[0] if len(values) == 1 and 0 <= values[0] <= 1 else None

    def release(self, keep: str | None, force: bool, /) -> None:
        """Offload the weights to the host and drop the key-value cache, or with `keep` drop the cache only."""
        # A request that has arrived since the last look ends first. New ones wait until the engine wakes.
        mode = "abort" if force else "wait"
        if keep is None:
            self.post(f"/sleep?level=1&mode={mode}")
            return
        self.post(f"/sleep?level=0&mode={mode}")
        try:
            self.post("/release_kv_cache_memory", flag="vLLM 0.32 or newer, which can keep the weights")
        except EngineRefusedError:
            with contextlib.suppress(EngineRefusedError):
                self.post("/wake_up?tags=scheduling")  # otherwise its requests would wait forever
            raise

    def resume(self) -> None:
        """Take the memory again, and continue with the requests that waited."""
        path = "/wake_up"
        woken = self.document(self.post(path), path)
        if woken.get("status", "awake") != "awake":
            raise self.failed("is not fully awake")
