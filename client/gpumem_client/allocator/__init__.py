"""PyTorch's caching allocator: statistics, heap, settings and snapshots."""
