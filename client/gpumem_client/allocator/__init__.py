"""PyTorch's caching allocator: statistics, heap, settings, snapshots and the text of its errors.

Other folders import: `allocator`, `allocator_environment`, `components`, `idle_cache`, `oom_message`,
`reclaimable`, `sampler`, `simulated`, `snapshot_file`.
"""
