"""vLLM through its development routes, for servers whose process does not report or that have several workers.

Source: vllm 0.32.0, vllm/entrypoints/serve/dev/sleep/api_router.py and vllm/v1/metrics/loggers.py. The routes exist
with VLLM_SERVER_DEV_MODE=1 only, and have no authentication of their own.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_exporter.actions.engines import Activity, EngineRefusedError
from gpumem_exporter.engines.adapter import Server, document, expect, sum_of_metrics, values_of_metric

_FLAGS = (
    "--enable-sleep-mode and VLLM_SERVER_DEV_MODE=1, or with --enable-sleep-mode below gpumem-run, which needs no "
    "development mode for an engine on one GPU"
)
_METRICS_SECONDS = 1.0
_REQUESTS = ("vllm:num_requests_running", "vllm:num_requests_waiting")


class Vllm:
    """An engine of vLLM."""

    name = "vLLM"
    titles: tuple[str, ...] = ("VLLM::", "vllm")
    port = 8000
    workers: tuple[str, ...] = ("VLLM::EngineCore", "VLLM::Worker")
    alone = False

    def authorize(self, _server: Server) -> Mapping[str, str]:
        """Return no header: the routes require none."""
        return {}

    def activity(self, server: Server) -> Activity:
        """Return whether the engine sleeps, and its requests from its own metrics."""
        argv = server.program.argv
        if "--port" in argv and not {"--enable-sleep-mode", "--enable_sleep_mode", "--config"} & set(argv):
            raise _not_enabled("it was started without")
        answer = server.get("/is_sleeping")
        if answer.status == 404:
            raise _not_enabled("it has no sleep routes; start it with")
        asleep = document(server, expect(server, answer, "/is_sleeping"), "/is_sleeping").get("is_sleeping")
        if not isinstance(asleep, bool):
            raise EngineRefusedError(ReasonCode.ENGINE_FAILED, "vLLM does not say whether it sleeps", outcome="failed")
        metrics = expect(server, server.get("/metrics"), "/metrics")
        return Activity(asleep, sum_of_metrics(metrics.body, _REQUESTS))

    def cache_use(self, server: Server) -> float | None:
        """Return the part of the key-value cache that requests use; None with several engines behind the port."""
        answer = server.exchange("GET", "/metrics", None, _METRICS_SECONDS, {})
        values = values_of_metric(expect(server, answer, "/metrics").body, "vllm:kv_cache_usage_perc")
        return values[0] if len(values) == 1 and 0 <= values[0] <= 1 else None

    def release(self, server: Server, keep: str | None, force: bool) -> None:
        """Offload the weights to the host and drop the key-value cache, or with `keep` drop the cache only."""
        # A request that has arrived since the last look ends first. New ones wait until the engine wakes.
        mode = "abort" if force else "wait"
        if keep is None:
            path = f"/sleep?level=1&mode={mode}"
            expect(server, server.post(path), path)
            return
        path = f"/sleep?level=0&mode={mode}"
        expect(server, server.post(path), path)
        path = "/release_kv_cache_memory"
        answer = server.post(path)
        if answer.status != 200:
            server.post("/wake_up?tags=scheduling")  # otherwise its requests would wait forever
        expect(server, answer, path, flag="vLLM 0.32 or newer, which can keep the weights")

    def resume(self, server: Server) -> None:
        """Take the memory again, and continue with the requests that waited."""
        path = "/wake_up"
        woken = document(server, expect(server, server.post(path), path), path)
        if woken.get("status", "awake") != "awake":
            raise EngineRefusedError(ReasonCode.ENGINE_FAILED, "vLLM is not fully awake", outcome="failed")


def _not_enabled(what: str) -> EngineRefusedError:
    return EngineRefusedError(ReasonCode.ENGINE_NOT_ENABLED, f"vLLM: {what} {_FLAGS}", outcome="unsupported")
