"""Out-of-memory errors: each is recorded once."""

from __future__ import annotations

from gpumem_exporter.features.feature import Feature, Node, Parts


def _build(node: Node) -> Parts:
    from gpumem_exporter.features.oom.oom_metrics import OOM
    from gpumem_exporter.features.oom.oom_recorder import OomRecorder
    from gpumem_exporter.node.job_ids import job_of_process

    recorder = OomRecorder(
        node.journal,
        node.store,
        clock=node.clock,
        wall_clock=node.wall_clock,
        gpu_of=node.processes.gpu_of,
        job_of=job_of_process,
        device_of=node.view.device_at_error,
    )
    node.errors, node.last_ooms = recorder, recorder.last.at
    return Parts(collectors=[OOM], tasks=[recorder.restore])


FEATURE = Feature(build=_build)
