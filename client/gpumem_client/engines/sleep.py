"""Releases and resumes the memory of vLLM's engine core in this process, without a route of its server.

Versions 0.32 and 0.33. A core that is different in a part that is used here is left alone.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import sys
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

from gpumem_client.wire.errors import CommandRefusedError
from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_client.wire.units import human_bytes

if TYPE_CHECKING:
    from concurrent.futures import Future

# How long the loop may take until it is between two steps.
_START_SECONDS = 10.0
# How long it may take to release or resume: the weights are copied between the device and the host.
_WORK_SECONDS = 150.0
_SPARE_HOST_BYTES = 1 << 30
_HANDLER = "_invoke_utility_method"
_HANDLER_PARAMETERS = ["name", "get_result", "output", "enqueue_output"]
_CALLS = ("is_running", "has_work", "is_sleeping", "wake_up", "release_kv_cache_memory")
_NUMBERS = itertools.count()


class CoreMemory:
    """The memory of one core. Its methods run in the reporter's thread, and raise CommandRefusedError."""

    def __init__(self, core: Any) -> None:
        self._core = core

    @staticmethod
    def is_supported(core: Any) -> bool:
        """Return whether the core has the loop, the queue and the calls that this module uses."""
        # The ranks of data parallelism would have to sleep together.
        core_class: Any = type(core)
        return hasattr(core, "input_queue") and not hasattr(core, "dp_group") and _has_calls(core_class)

    @property
    def busy(self) -> bool:
        """Whether the core has running or queued requests."""
        return bool(self._core.has_work())

    def release(self, *, keep_weights: bool, force: bool) -> None:
        """Offload the weights to the host and drop the key-value cache, or the cache only.

        No request is aborted without `force`. Requests that arrive later wait until the core wakes.
        """
        self._require_sleep_mode()
        if not keep_weights:
            _require_host_memory(sum(each.handle[1] for each in sleep_segments().values() if each.tag == "weights"))
        mode = "abort" if force else "wait"

        def release() -> Any:
            core = self._core
            if core.is_sleeping():
                raise CommandRefusedError("vLLM sleeps already", ReasonCode.ENGINE_ASLEEP)
            if not force and core.has_work():
                raise CommandRefusedError("vLLM has requests", ReasonCode.ENGINE_BUSY)
            return core.sleep(0 if keep_weights else 1, mode)

        self._in_loop(release)
        if keep_weights:
            self._in_loop(self._drop_cache)

    def resume(self) -> None:
        """Take the memory again, and continue with the requests that waited."""
        self._require_sleep_mode()

        def resume() -> Any:
            if not self._core.is_sleeping():
                raise CommandRefusedError("vLLM does not sleep", ReasonCode.ENGINE_AWAKE)
            return self._core.wake_up()

        self._in_loop(resume)

    def _drop_cache(self) -> Any:
        try:
            return self._core.release_kv_cache_memory()
        except BaseException:
            self._core.wake_up(["scheduling"])  # otherwise its requests would wait forever
            raise

    def _require_sleep_mode(self) -> None:
        config = getattr(getattr(self._core, "vllm_config", None), "model_config", None)
        if getattr(config, "enable_sleep_mode", None) is not True:
            reason = "vLLM was started without --enable-sleep-mode"
            raise CommandRefusedError(reason, ReasonCode.ENGINE_NOT_ENABLED)

    def _in_loop(self, function: Callable[[], Any]) -> None:
        """Run a function in the core's loop, and wait until it and the future that it may return have ended."""
        from concurrent.futures import Future, wait  # vLLM has loaded it

        # vLLM's own loop does the work, between two steps: the core takes utility requests from its input queue, a
        # request calls a method of the core by name, and a method that returns a future is answered when the future
        # completes. So a request for a method that only this module knows, with a future that never completes, runs in
        # the loop and sends no answer to a client of vLLM.
        # Each request has a name of its own: one that was refused may still be in the queue, and a name that is not
        # there is answered with an error, which ends the client of vLLM.
        core = self._core
        work: Future[Any] = Future()
        name = f"_gpumem_call_{next(_NUMBERS)}"

        def call() -> Future[None]:
            delattr(core, name)
            if work.set_running_or_notify_cancel():
                try:
                    work.set_result(function())
                except Exception as error:  # noqa: BLE001 - it must not reach vLLM's loop, which would end
                    work.set_exception(error)
            return Future()

        if not core.is_running():
            raise CommandRefusedError("vLLM shuts down", ReasonCode.ENGINE_BUSY)
        utility = sys.modules["vllm.v1.engine"].EngineCoreRequestType.UTILITY
        setattr(core, name, call)
        core.input_queue.put_nowait((utility, (0, -1, name, ())))
        # After a refusal, the loop finds the work cancelled and runs nothing.
        if not wait([work], _START_SECONDS).done and work.cancel():
            raise CommandRefusedError(
                f"vLLM's loop was busy with one step for {_START_SECONDS:g} s", ReasonCode.ENGINE_BUSY
            )
        if not wait([work], _WORK_SECONDS).done:
            raise TimeoutError(f"vLLM did not end it within {_WORK_SECONDS:g} s; it may still do so")
        result = work.result()
        if isinstance(result, Future):
            result.result(_WORK_SECONDS)


@functools.lru_cache(maxsize=4)
def _has_calls(core_class: Hashable) -> bool:
    handler: Any = getattr(core_class, _HANDLER, None)
    sleep: Any = getattr(core_class, "sleep", None)
    if handler is None or sleep is None or not all(hasattr(core_class, name) for name in _CALLS):
        return False
    defers = list(inspect.signature(handler).parameters) == _HANDLER_PARAMETERS
    return defers and "mode" in inspect.signature(sleep).parameters


def sleep_segments() -> dict[int, Any]:
    """Return the segments of sleep mode's allocator by their addresses: each has a tag, and its bytes in `handle`."""
    module = sys.modules.get("vllm.device_allocator.cumem")
    instance = getattr(getattr(module, "CuMemAllocator", None), "instance", None)
    # A copy: the engine's threads change the dictionary.
    return {} if instance is None else dict(instance.pointer_to_data)


def _require_host_memory(needed: int) -> None:
    available = host_available_bytes()
    if available is not None and needed + _SPARE_HOST_BYTES > available:
        raise CommandRefusedError(
            f"the weights take {human_bytes(needed)} of host memory, of which {human_bytes(available)} are available; "
            "--keep weights releases the key-value cache only",
            ReasonCode.HOST_MEMORY_SHORT,
        )


def host_available_bytes(proc: str = "/proc", cgroups: str = "/sys/fs/cgroup") -> int | None:
    """Return the host memory that this process can still take, within the limits of its cgroups (version 2).

    None if it is not known.
    """
    found = []
    try:
        lines = _read(f"{proc}/meminfo").splitlines()
        found += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
        group = next(line[3:] for line in _read(f"{proc}/self/cgroup").splitlines() if line.startswith("0::"))
    except (OSError, ValueError, StopIteration):
        return min(found, default=None)
    # A limit of any cgroup above counts, too. Inactive files are released before the limit is reached.
    folder = cgroups + group.rstrip("/")
    while len(folder) >= len(cgroups):
        try:
            limit, current = _read(f"{folder}/memory.max").strip(), int(_read(f"{folder}/memory.current"))
            files = [line for line in _read(f"{folder}/memory.stat").splitlines() if line.startswith("inactive_file ")]
            if limit != "max":
                found.append(max(0, int(limit) - current + sum(int(line.split()[1]) for line in files)))
        except (OSError, ValueError):
            pass  # the root has no limit, and a container may not see its cgroups
        folder = os.path.dirname(folder)  # noqa: PTH120 - the client does not import pathlib
    return min(found, default=None)


def _read(path: str) -> str:
    with open(path) as file:  # noqa: PTH123 - as above
        return file.read()
