"""SGLang.

Source: sglang 0.5.23, srt/entrypoints/http_server.py, srt/entrypoints/v1_loads.py, srt/utils/auth.py and
srt/managers/scheduler_components/weight_updater.py. A second release, and the resume of memory that was not released,
end its scheduler, and no route says what is released. So the exporter acts only if the process reports that.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from gpumem_client.wire.protocol import ReasonCode
from gpumem_exporter.actions.engines import Activity, EngineRefusedError
from gpumem_exporter.engines.adapter import Server, document, expect

_TAGS = {"kv_cache": "kv_cache", "weights": "weights", "cuda_graphs": "cuda_graph"}
"""The engine's tags by component."""
_ABORT_SECONDS = 15.0
_LOOK_SECONDS = 0.25


class Sglang:
    """An engine of SGLang."""

    name = "SGLang"
    titles: tuple[str, ...] = ("sglang",)
    port = 30000
    alone = False

    def authorize(self, server: Server) -> Mapping[str, str]:
        """Return the key of its command line: the administrator's if there is one."""
        key = server.program.option("--admin-api-key") or server.program.option("--api-key")
        return {"Authorization": f"Bearer {key}"} if key else {}

    def activity(self, server: Server) -> Activity:
        """Return whether the process reports released memory, and the requests of all data-parallel ranks."""
        asleep = bool(_asleep(server))
        path = "/v1/loads?include=core"
        loads = document(server, expect(server, server.get(path), path, flag="SGLang 0.5 or newer"), path).get("loads")
        counts = [
            rank.get(name) if isinstance(rank, dict) else None
            for rank in (loads if isinstance(loads, list) else [])
            for name in ("num_running_reqs", "num_waiting_reqs")
        ]
        known = [count for count in counts if isinstance(count, int)]
        return Activity(asleep, sum(known) if known and len(known) == len(counts) else None)

    def release(self, server: Server, keep: str | None, force: bool) -> None:
        """Release the key-value cache, and the weights unless they are kept. CUDA graphs stay."""
        if force:
            self._abort_requests(server)
        path = "/release_memory_occupation"
        tags = [tag for tag in ("kv_cache", "weights") if tag != keep]
        expect(server, server.post(path, {"tags": tags}), path)

    def _abort_requests(self, server: Server) -> None:
        """Abort all requests, and wait until there are none: a release beside a request ends the scheduler."""
        path = "/abort_request"
        expect(server, server.post(path, {"rid": "", "abort_all": True}), path)
        end = time.monotonic() + _ABORT_SECONDS
        while self.activity(server).requests != 0:
            if time.monotonic() >= end:
                reason = f"SGLang still has requests {_ABORT_SECONDS:g} s after they were aborted"
                raise EngineRefusedError(ReasonCode.ENGINE_BUSY, reason)
            time.sleep(_LOOK_SECONDS)

    def resume(self, server: Server) -> None:
        """Take again what the process reports as released."""
        path = "/resume_memory_occupation"
        tags = [_TAGS[name] for name in _asleep(server) if name in _TAGS]
        if not tags:
            raise EngineRefusedError(ReasonCode.ENGINE_FAILED, "SGLang: its report does not show what is released")
        expect(server, server.post(path, {"tags": tags}), path)


def _asleep(server: Server) -> set[str]:
    """Return the components with released memory, `other` if they are not known."""
    samples = server.reporter.report.devices if server.reporter is not None else ()
    known = [sample for sample in samples if sample.unmapped_bytes is not None]
    if not known:
        reason = (
            "SGLang does not say whether it sleeps, and a second release would end it: start it with "
            "--enable-memory-saver below gpumem-run, so that its process reports"
        )
        raise EngineRefusedError(ReasonCode.ENGINE_NOT_ENABLED, reason, outcome="unsupported")
    names = {name for sample in known for name, size in sample.component_unmapped_bytes.items() if size}
    return names or ({"other"} if any(sample.unmapped_bytes for sample in known) else set())
