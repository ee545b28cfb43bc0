"""Predicts the memory of a training job before it runs.

`worker` starts a fresh interpreter. `simulation` runs the job's code there on fake tensors, and `tracing` records its
allocations. `cuda_rules` and `kernels` make those the allocations of CUDA. `trace` replays them through a model of the
caching allocator, `search` does so for many batch sizes, and `planner` makes a plan of the results. None of them needs
a GPU or initializes CUDA; only `profile` does.
"""
