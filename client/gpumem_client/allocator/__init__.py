"""PyTorch's caching allocator: statistics, heap, settings and snapshots.

Other folders import: `allocator`, `allocator_environment`, `components`, `heap_sum`, `idle_cache`, `reclaimable`,
`sampler`, `simulated`, `snapshot_file`, `unmapped`.
"""
