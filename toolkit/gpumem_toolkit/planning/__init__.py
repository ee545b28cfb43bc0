"""Predicts the memory of a training job before it runs.

`planner` makes the plan in a fresh interpreter, which `planner_process` starts. There, `simulation` runs the job's code
on fake tensors and records a `trace`. `cuda_operator_rules`, `recurrent` and `kernel_memory_rules` add what a GPU
allocates. `search` replays traces to find the largest batch size. Only `measured_plan` needs a GPU.

Other folders import: `command`, `fake_model`, `search`.
"""
