"""Predicts the memory of a training job before it runs.

`worker` starts a fresh interpreter. `simulation` runs the job's code there on fake tensors, and `tracing` records its
allocations. `cuda_rules` and `kernels` adapt them to CUDA. `trace` replays them through a model of the caching
allocator, `search` finds the largest batch size, and `planner` makes the plan. Only `profile` needs a GPU.
"""
