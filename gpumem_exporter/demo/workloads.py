"""The demo's workloads: their programs, devices, names and users."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpumem_exporter.demo import programs
from gpumem_exporter.demo.programs import MIB, Program

DEVICES = 8


@dataclass(frozen=True, slots=True)
class Workload:
    """One workload of one or more processes."""

    name: str
    """The label `workload`, which starts with `demo-` so that simulated series can be recognized."""
    program: Program
    command: str
    user: str
    placements: tuple[tuple[int, ...], ...]
    """The devices of each process."""
    ranks: bool = False
    reports: bool = True
    torch_version: str = "2.9.1+cu128"
    context_bytes: int = 520 * MIB
    """The memory of CUDA, cuBLAS and NCCL on each device, outside the allocator."""
    nccl_bytes: int | None = None
    """The part of it that NCCL reports."""
    age_seconds: float = 4800.0
    """How long its first process has run when the demo starts."""
    restart_ticks: int = 20
    """The time from the end of a process to the start of the next one."""
    planned_bytes: int | None = None
    k8s_pod: str = ""
    """The namespace and the name of the pod without its ordinal: `namespace/name`; empty outside of pods."""
    slurm_job_id: str = ""
    repeats: bool = True
    """Whether each minute before the demo is like the last one; otherwise the whole time is simulated."""
    leaks: bool = False
    """Whether its memory grows in each minute by as much as in the last one."""
    scale: float = 1.0
    """The factor of all its sizes."""


DEMO_WORKLOADS = (
    Workload(
        *("demo-llm-pretrain", programs.pretraining, "python pretrain.py", "ml-train", ((0,), (1,), (2,), (3,))),
        ranks=True,
        context_bytes=1710 * MIB,
        nccl_bytes=1090 * MIB,
        planned_bytes=72_000 * MIB,  # a good plan, slightly too high
        k8s_pod="training/llm-pretrain-worker",
    ),
    Workload(
        *("demo-rag-indexer-leak", programs.indexing_with_a_leak, "python build_index.py", "search", ((4,),)),
        age_seconds=3720.0,
        restart_ticks=16,
        leaks=True,
        k8s_pod="search/rag-indexer",
    ),
    Workload(
        *("", programs.embedding_server, "tritonserver", "search", ((4,),)),
        reports=False,
        context_bytes=410 * MIB,
        k8s_pod="search/embeddings",
    ),
    Workload(
        *("demo-pipeline-finetune", programs.pipeline_training, "python finetune_pipeline.py", "alice", ((4, 6),)),
        context_bytes=690 * MIB,
        age_seconds=6001.0,
        slurm_job_id="4711",
    ),
    Workload(
        *("demo-asr-varlen", programs.varying_length_training, "python train_asr.py", "speech", ((6,),)),
        age_seconds=5400.0,
        context_bytes=560 * MIB,
        planned_bytes=24_000 * MIB,  # planned for batches of the mean length
        slurm_job_id="4708",
    ),
    Workload(
        *("demo-notebook", programs.notebook, "python -m ipykernel_launcher", "carol", ((7,),)),
        torch_version="2.7.1+cu126",
        age_seconds=4200.0 + 2400.0,  # its second run was 40 minutes ago
        repeats=False,
        k8s_pod="notebooks/jupyter-carol",
    ),
    Workload(
        *("demo-moe-finetune", programs.mixture_of_experts, "python finetune_moe.py", "ml-train", ((6,), (7,))),
        age_seconds=4770.0,  # its last validation was half a minute ago
        ranks=True,
        slurm_job_id="4715",
    ),
    Workload(
        *("demo-nightly-eval", programs.evaluation, "python evaluate.py", "ci", ((5,),)),
        age_seconds=110.0,  # the second run
        restart_ticks=40,
        k8s_pod="ci/nightly-eval",
    ),
    Workload(
        *("demo-sleeping-engine", programs.sleeping_engine, "vllm serve", "serving", ((5,),)),
        context_bytes=640 * MIB,
        repeats=False,
        k8s_pod="serving/sleeping-engine",
    ),
    Workload(
        *("demo-llm-server", programs.language_model_server, "vllm serve", "serving", ((5,),)),
        context_bytes=640 * MIB,
        k8s_pod="serving/llm-server",
    ),
    Workload(
        *("demo-forgotten-notebook", programs.forgotten_notebook, "python -m ipykernel_launcher", "dave", ((5,),)),
        k8s_pod="notebooks/jupyter-dave",
        age_seconds=9 * 3600.0,
    ),
)
"""Devices 0 to 3 are full without problems. On device 4, a leak takes the memory that another runtime leaves. On device
5, an engine has a much larger key-value cache than its requests need, and a notebook holds a model that nobody uses. On
device 6, a fragmented heap stays within its memory fraction. On device 7, the notebook's cache is the memory that the
larger rank of the mixture of experts lacks."""


def workloads_of(processes: int) -> tuple[Workload, ...]:
    """Return the demo's workloads with this number of processes.

    For more processes than the demo has, each copy of the workloads has its own names and is one device further, and
    all sizes are smaller by the number of copies.
    """
    left = processes
    found: list[Workload] = []
    copies = max(1, -(-processes // sum(len(workload.placements) for workload in DEMO_WORKLOADS)))
    for copy in range(copies):
        for workload in DEMO_WORKLOADS:
            placements = workload.placements[:left]
            left -= len(placements)
            if placements:
                found.append(_copy(workload, copy, placements, 1 / copies))
    return tuple(found)


def _copy(workload: Workload, copy: int, placements: tuple[tuple[int, ...], ...], scale: float) -> Workload:
    suffix = f"-{copy + 1}" if copy else ""
    planned = workload.planned_bytes
    return replace(
        workload,
        name=workload.name and workload.name + suffix,
        placements=tuple(tuple((device + copy) % DEVICES for device in each) for each in placements),
        scale=scale,
        planned_bytes=None if planned is None else int(planned * scale),
        k8s_pod=workload.k8s_pod and workload.k8s_pod + suffix,
        slurm_job_id=workload.slurm_job_id and str(int(workload.slurm_job_id) + 100 * copy),
    )
