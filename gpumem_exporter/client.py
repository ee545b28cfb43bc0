"""Says where the client of version 0.2 went."""

raise ImportError(
    "gpumem_exporter.client is now two packages: `import gpumem_client` (start, step, phase, clear_cache, ...) and"
    " `import gpumem_toolkit` (oom_guard, leak_detector, watch, ...)"
)
