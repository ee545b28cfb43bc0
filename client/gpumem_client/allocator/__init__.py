"""PyTorch's caching allocator: statistics, heap, settings and snapshots.

Other folders import: `allocator`, `components`, `heap`, `idle_cache`, `reclaimable`, `sampler`, `settings`,
`simulated`, `snapshot_file`, `unmapped`.
"""
