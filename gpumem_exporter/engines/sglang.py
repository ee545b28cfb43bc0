"""SGLang.

Source: sglang 0.5.23, srt/entrypoints/http_server.py, srt/entrypoints/v1_loads.py, srt/utils/auth.py and
srt/managers/scheduler_components/weight_updater.py.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import ClassVar

from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_exporter.actions.engines import Activity, EngineRefusedError
from gpumem_exporter.engines.adapter import Engine, not_enabled

_MAX_REMEMBERED = 1024
_ABORT_SECONDS = 15.0
_LOOK_SECONDS = 0.25


class Sglang(Engine):
    """An engine of SGLang."""

    name = "SGLang"
    titles = ("sglang",)
    port = 30000
    workers = ("sglang::scheduler", "sglang::detokenizer")
    released: ClassVar[OrderedDict[int, list[str]]] = OrderedDict()
    """What the exporter has released, by the inode of the server's socket."""

    def authorize(self) -> Mapping[str, str]:
        """Return the key of its command line: the administrator's if there is one."""
        key = self.program.option("--admin-api-key") or self.program.option("--api-key")
        return {"Authorization": f"Bearer {key}"} if key else {}

    def activity(self) -> Activity:
        """Return whether the process reports released memory, and the requests of all data-parallel ranks."""
        asleep, path = self._asleep(), "/v1/loads?include=core"
        loads = self.document(self.get(path, flag="SGLang 0.5 or newer"), path).get("loads")
        counts = [
            rank.get(name) if isinstance(rank, dict) else None
            for rank in (loads if isinstance(loads, list) else [])
            for name in ("num_running_reqs", "num_waiting_reqs")
        ]
        known = [count for count in counts if isinstance(count, int)]
        return Activity(asleep, sum(known) if known and len(known) == len(counts) else None)

    def release(self, keep: str | None, force: bool, /) -> None:
        """Release the key-value cache, and the weights unless they are kept. CUDA graphs stay."""
        if force:
            self._abort_requests()
        tags = [tag for tag in ("kv_cache", "weights") if tag != keep]
        self.post("/release_memory_occupation", {"tags": tags})
        self.released[self.listener.inode] = tags
        while len(self.released) > _MAX_REMEMBERED:
            self.released.popitem(last=False)

    def _abort_requests(self) -> None:
        """Abort all requests, and wait until there are none."""
        # A release beside a request ends the scheduler.
        self.post("/abort_request", {"rid": "", "abort_all": True})
        end = time.monotonic() + _ABORT_SECONDS
        while self.activity().requests != 0:
            if time.monotonic() >= end:
                reason = f"SGLang still has requests {_ABORT_SECONDS:g} s after they were aborted"
                raise EngineRefusedError(ReasonCode.ENGINE_BUSY, reason)
            time.sleep(_LOOK_SECONDS)

    def resume(self) -> None:
        """Take again what the exporter has released."""
        # To resume memory that was not released ends the scheduler, and no route says what is released.
        path = "/resume_memory_occupation"
        tags = self.released.get(self.listener.inode)
        if tags is None:
            raise not_enabled(
                f"this exporter has not released the memory of SGLang since its start, and to resume other memory "
                f"would end SGLang: use its own route {path}"
            )
        self.post(path, {"tags": tags})
        del self.released[self.listener.inode]

    def _asleep(self) -> bool:
        """Return whether the process reports released memory."""
        # No route says it, and a second release ends the scheduler.
        samples = self.reporter.report.devices if self.reporter is not None else ()
        known = [sample for sample in samples if sample.unmapped_bytes is not None]
        if not known:
            raise not_enabled(
                "SGLang does not say whether it sleeps, and a second release would end it: start it with "
                "--enable-memory-saver below gpumem-run, so that its process reports"
            )
        return any(sample.unmapped_bytes for sample in known)
