"""What PyTorch's caching allocator shows: statistics, heap, settings and snapshots."""
