"""A Ray driver with three actors of one class, of which two have a name, each with a GPU or a part of one."""

from __future__ import annotations

import ray
from statement import state, state_and_wait


@ray.remote(num_gpus=0.5)
class Rollout:
    def generate(self, mebibytes: int) -> int:
        import torch

        rows = torch.empty(mebibytes << 20, dtype=torch.uint8, device="cuda")
        context = ray.get_runtime_context()
        job, actor, name = context.get_job_id(), context.get_actor_id(), context.get_actor_name()
        state_and_wait("actor", job=job, actor=actor, name=name)
        return len(rows)


if __name__ == "__main__":
    ray.init(num_cpus=3, num_gpus=2, include_dashboard=False, log_to_driver=False)
    actors = [Rollout.options(name=name).remote() for name in ("first", "second", None)]
    running = [actor.generate.remote(number + 1) for number, actor in enumerate(actors)]
    state("driver")
    assert ray.get(running) == [1 << 20, 2 << 20, 3 << 20]
    ray.shutdown()
