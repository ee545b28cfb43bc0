"""Predicts the memory of a training job before it runs.

`planner` makes the plan in a fresh interpreter, which `worker` starts. There, `simulation` runs the job's code on fake
tensors and records a `trace` of its allocations. `cuda_rules`, `recurrent` and `kernels` add what a GPU
allocates. `search` replays traces through a model of the caching allocator to find the largest batch size. Only
`measured` needs a GPU.

Other folders import: `command`, `model`, `search`.
"""
