"""The metrics of inference engines, and of the use of their key-value caches."""

from __future__ import annotations

from collections.abc import Iterator

from gpumem_client.wire.protocol import KV_CACHE_STATES
from gpumem_exporter.core.samples import KV_PEAK_WINDOWS
from gpumem_exporter.metrics.collector_types import Collector, Metric, Sample, Subject, View, listed

_REPORTER = ("pid", "workload", "rank")
_TORCH = ("gpu", "uuid", *_REPORTER)

INFO = Metric(
    "gpumem_engine_info",
    "gauge",
    "Description of the inference engine in a reporting process; the value is always 1, with one series per pid. engine"
    " is vllm, sglang or another name. state is starting, serving, idle or asleep, and empty if it is unknown. model is"
    " empty with --web.hide-identities. Join on pid.",
    (*_REPORTER, "engine", "version", "model", "state"),
)
KV_CACHE = Metric(
    "gpumem_engine_kv_cache_bytes",
    "gauge",
    "Bytes of the engine's key-value cache on the device by state. used: by running requests. evictable: prefix cache,"
    " kept for later requests and usable at once. free: not used. The three add up to gpumem_torch_component_bytes of"
    " kv_cache; an unknown state is absent. All are absent while the cache is unmapped.",
    (*_TORCH, "state"),
)
KV_CACHE_PEAK = Metric(
    "gpumem_engine_kv_cache_used_peak_bytes",
    "gauge",
    "Highest gpumem_engine_kv_cache_bytes of state used in the window until now (1h, 24h), from about one reading a"
    " second. A lower bound if gpumem_engine_kv_cache_observed_seconds is less than the window. Starts again with"
    " another process; kept over a restart of the exporter with --storage.path.",
    (*_TORCH, "window"),
)
KV_CACHE_OBSERVED = Metric(
    "gpumem_engine_kv_cache_observed_seconds",
    "gauge",
    "The part of the window until now in which the use of the key-value cache was known.",
    (*_TORCH, "window"),
)


def _engines(view: View) -> Iterator[Subject]:
    """Yield what each inference engine is, and the use of its key-value cache on each device."""
    for pid, process in view.names.reporting:
        report, engine = process.report, process.report.engine
        labels = (pid, report.process.workload, report.process.rank)
        if engine is not None:
            model = "" if view.hide_identities else engine.model
            row = (*labels, engine.name, engine.version, model, engine.state)
            yield Subject((process.key, ""), listed, ([(INFO, row, 1)],))
        for sample in report.devices:
            if not sample.kv_cache_bytes:
                continue
            place = (view.gpu_by_uuid.get(sample.uuid, ""), sample.uuid, *labels)
            samples: list[Sample] = [
                (KV_CACHE, (*place, state), sample.kv_cache_bytes.get(state)) for state in KV_CACHE_STATES
            ]
            for window in KV_PEAK_WINDOWS:
                used_bytes, observed_seconds = view.snapshot.kv_cache_peak(pid, sample, window) or (None, None)
                samples.append((KV_CACHE_PEAK, (*place, window), used_bytes))
                samples.append((KV_CACHE_OBSERVED, (*place, window), observed_seconds))
            yield Subject((process.key, sample.uuid), listed, (samples,))


ENGINE = Collector("engines", (INFO, KV_CACHE, KV_CACHE_PEAK, KV_CACHE_OBSERVED), _engines)
