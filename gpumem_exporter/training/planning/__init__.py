"""What a training job will take of a GPU, before it runs.

`tracing` runs the job's own Python on fake tensors and writes down every allocation; `kernels`, `attention` and
`autocast` make that the allocations which the CUDA kernels would ask for; `replay` plays them through a model of the
caching allocator; `planner` asks that for many batch sizes. Nothing here needs a GPU, and nothing initialises CUDA.
"""
