"""Reports for benchmarks: every value changes with each tick, as on a busy node."""

from __future__ import annotations

from collections.abc import Sequence

from gpumem_client.wire.protocol import DeviceSample, ProcessIdentity, Report

GIB = 2**30
PHASES = (
    *("forward", "backward", "optimizer", "data", "eval", "checkpoint"),
    *("logging", "sampling", "compile", "allreduce", "warmup", "other"),
)
COMPONENTS = ("parameters", "gradients", "optimizer_state", "other")
"""With what the exporter derives, a process has about 40 series on each device."""


def identity(
    pid: int, *, start_time_ticks: int = 5, pid_namespace: int = 4026531836, session: str = "", started: float = 0.0
) -> ProcessIdentity:
    """Return the identity of a training process."""
    return ProcessIdentity(
        pid=pid,
        start_time_ticks=start_time_ticks,
        pid_namespace=pid_namespace,
        session=session or f"{pid}",
        session_started_seconds=started,
        workload="llm-pretrain",
        rank=str(pid),
        command="python train.py",
        torch_version="2.15.0+cu132",
    )


def report(of: ProcessIdentity, uuids: Sequence[str], tick: int, *, hold_seconds: float = 0.0) -> Report:
    """Return a report of a process that is on these devices."""
    base = GIB // 4 + 4096 * tick + of.pid
    samples = tuple(
        DeviceSample(
            uuid=each,
            allocated_bytes=base + index,
            reserved_bytes=base + 900_000,
            active_bytes=base + index,
            inactive_split_bytes=70_000 + tick,
            requested_bytes=base - 5000,
            allocated_peak_bytes=base + 500_000,
            reserved_peak_bytes=base + 900_000,
            private_pools_bytes=2048 + tick,
            reclaimable_bytes=700_000 + tick,
            alloc_retries=tick,
            ooms=tick // 2,
            segments_allocated=500 + tick,
            segments_freed=300 + tick,
            cache_flushes=12 + tick,
            phase_peak_bytes={phase: base + number for number, phase in enumerate(PHASES)},
            component_bytes={component: base // 4 + number for number, component in enumerate(COMPONENTS)},
        )
        for index, each in enumerate(uuids)
    )
    return Report(
        of,
        sequence=tick,
        devices=samples,
        pinned_host_bytes=10**6 + tick,
        step=tick,
        actions=("empty_cache", "collect_garbage", "reset_peak"),
        hold_seconds=hold_seconds,
    )
