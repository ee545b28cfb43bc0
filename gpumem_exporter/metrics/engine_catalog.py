"""The metrics of components and of inference engines, a part of the table in `catalog`."""

from __future__ import annotations

from gpumem_exporter.metrics.subjects import Metric

_REPORTER = ("pid", "workload", "rank")
_TORCH = ("gpu", "uuid", *_REPORTER)

TORCH_COMPONENT = Metric(
    "gpumem_torch_component_bytes",
    "gauge",
    "Allocated bytes by component: parameters, gradients, optimizer_state, other. Of an inference engine: weights,"
    " kv_cache, cuda_graphs, runtime, other; they add up to gpumem_torch_allocated_bytes.",
    (*_TORCH, "component"),
)
TORCH_COMPONENT_UNMAPPED = Metric(
    "gpumem_torch_component_unmapped_bytes",
    "gauge",
    "The part of gpumem_torch_unmapped_bytes that is known by component, of an engine that sleeps: weights, kv_cache"
    " and others. They are not memory of the device. Absent while the engine is awake.",
    (*_TORCH, "component"),
)
ENGINE_INFO = Metric(
    "gpumem_engine_info",
    "gauge",
    "Description of the inference engine in a reporting process; the value is always 1, with one series per pid. engine"
    " is vllm, sglang or another name. state is starting, serving, idle or asleep, and empty if it is unknown. model is"
    " empty with --web.hide-identities. Join on pid.",
    (*_REPORTER, "engine", "version", "model", "state"),
)
ENGINE_KV_CACHE = Metric(
    "gpumem_engine_kv_cache_bytes",
    "gauge",
    "Bytes of the engine's key-value cache on the device by state. used: by running requests. evictable: prefix cache,"
    " kept for later requests and usable at once. free: not used. The three add up to gpumem_torch_component_bytes of"
    " kv_cache; an unknown state is absent. All are absent while the cache is unmapped.",
    (*_TORCH, "state"),
)
ENGINE_KV_CACHE_PEAK = Metric(
    "gpumem_engine_kv_cache_used_peak_bytes",
    "gauge",
    "Highest gpumem_engine_kv_cache_bytes of state used in the window until now (1h, 24h), from about one reading a"
    " second. A lower bound if gpumem_engine_kv_cache_observed_seconds is less than the window. Starts again with"
    " another process; kept over a restart of the exporter with --storage.path.",
    (*_TORCH, "window"),
)
ENGINE_KV_CACHE_OBSERVED = Metric(
    "gpumem_engine_kv_cache_observed_seconds",
    "gauge",
    "The part of the window until now in which the use of the key-value cache was known.",
    (*_TORCH, "window"),
)

COMPONENTS = (TORCH_COMPONENT, TORCH_COMPONENT_UNMAPPED)
ENGINES = (ENGINE_INFO, ENGINE_KV_CACHE, ENGINE_KV_CACHE_PEAK, ENGINE_KV_CACHE_OBSERVED)
