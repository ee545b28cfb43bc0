"""The words that page, terminal and documentation use for the same thing, each with its explanation."""

from __future__ import annotations

WORDS: dict[str, dict[str, str]] = {
    name: {"label": label, "help": text}
    for name, label, text in (
        ("total", "Total", "The memory of the device."),
        ("used", "Used", "What the driver counts as used."),
        ("free", "Free", "What any process can take now."),
        ("allocatable", "Allocatable", "What a process can get after a clear: free memory and idle cache."),
        ("allocated", "Allocated", "In tensors."),
        ("reserved", "Reserved", "What PyTorch took from the driver: allocated memory and cache."),
        ("idle_cache", "Idle cache", "Cache that no job needed for a minute. It stays free after a clear."),
        ("other_cache", "Other cache", "Cache that a job will need again, or that lies between tensors."),
        ("not_torch", "Not torch's", "CUDA contexts, libraries, the driver, and processes that do not report."),
        ("reclaimable", "Reclaimable", "Cache that a clear would free at this instant. The job may need it again."),
        ("fragmented", "Fragmented", "Cache that a clear cannot free, because tensors lie between its parts."),
        ("non_torch", "Non-torch", "Used outside of PyTorch's allocator: CUDA context, NCCL, libraries."),
        ("unmapped", "Unmapped", "Reserved by PyTorch, but not held on the device: the job sleeps."),
        ("other_processes", "Other processes", "Used by processes that do not report."),
        ("driver_reserved", "Driver reserved", "Kept by the driver and the firmware."),
        ("unattributed", "Unattributed", "Used, but by no process that the driver lists."),
        ("torch_allocated", "Allocated", "In tensors."),
        ("torch_reclaimable", "Reclaimable", "Cache that a clear would free at this instant. A job may need it again."),
        ("torch_fragmented", "Fragmented", "Cache that a clear cannot free."),
        ("engine", "Engine", "The inference engine, its version and its model."),
        ("kv_cache", "KV cache", "The key-value cache of an inference engine, of a fixed size."),
        ("kv_used", "Used", "Key-value cache of running requests."),
        ("kv_evictable", "Evictable", "Prefix cache: of ended requests, kept for similar ones, usable at once."),
        ("kv_free", "Free", "Key-value cache that no request uses."),
        ("weights", "Weights", "The parameters of the model that an engine serves."),
        ("cuda_graphs", "CUDA graphs", "Memory of captured CUDA graphs."),
        ("runtime", "Runtime", "Buffers of the engine."),
        ("other", "Other", "Activations, workspaces, and what no other component counts."),
        ("parameters", "Parameters", "The parameters of the model."),
        ("gradients", "Gradients", "The gradients of the parameters."),
        ("optimizer_state", "Optimizer state", "The state of the optimizer."),
        ("job", "Job", "The processes of one workload and one owner."),
        ("owner", "Owner", "User, pod, Slurm or Ray job."),
        ("devices", "GPUs", "The devices that the job uses."),
        (
            "state",
            "State",
            "What the job does: training, serving, running, idle, sleeping, starting, orphan, not reporting.",
        ),
        ("growth", "Growth", "How much more memory the job keeps with each hour."),
        ("step", "Step", "The last training step."),
        ("since", "Since", "The start of the oldest process of the job."),
    )
}
