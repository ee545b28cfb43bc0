"""Hooks into torch and the interpreter, and the boundary that keeps the client's errors from the user's code.

One module here installs and removes each hook of `HOOKS`. After `client.stop()`, torch, `sys.meta_path`, `builtins`,
optimizer classes and DataLoader classes are as they were before `client.start()`.

The hook on steps does not change while an optimizer iterates over the hooks, because that would raise in the optimizer.
A hook that cannot be removed at once does nothing until it is removed. The ending reporter removes the hook on steps;
the next call of the remove function removes any other hook.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["HOOKS", "Hook"]


class Hook(NamedTuple):
    """One hook: its module, its target, and the calls that install and remove it."""

    module: str
    target: str
    installed_by: str
    removed_by: str


HOOKS = (
    Hook(
        "cuda_start",
        "a finder on `sys.meta_path`, and `exec_module` of the loader of `torch.cuda`",
        "`start()` before torch is imported",
        "the import of `torch.cuda`; `stop()`",
    ),
    Hook("cuda_start", "a call in `torch.cuda._queued_calls`", "`start()` before CUDA starts", "`stop()`"),
    Hook(
        "steps",
        "a post hook on the steps of all optimizers",
        "the first listener: `start()`, `watch` and others",
        "`stop()`, if nothing else listens",
    ),
    Hook(
        "graph_captures",
        "the methods of `torch.cuda.CUDAGraph` that start and end a capture",
        "`start()`, `clear_cache` and others",
        "`stop()`",
    ),
    Hook(
        "model_forward",
        "a pre hook on the forward passes of all modules",
        "`milestones` of a model on the host",
        "the first forward pass on a device, or after the end",
    ),
    Hook(
        "storage_tags",
        "a tagger in the registry of `torch.serialization`",
        "`save_checkpoint`",
        "the end of the save",
    ),
    Hook("lifecycle", "a call at the interpreter's exit", "`start()`", "`stop()`"),
    Hook(
        "lifecycle",
        "a function of `os.register_at_fork`",
        "`start()`, `phase` and others",
        "never, Python cannot; without the client it resets only the phases, in a forked child",
    ),
    Hook(
        "out_of_memory",
        "an observer of out-of-memory errors",
        "`start()`",
        "never, torch cannot; it does nothing after `stop()`",
    ),
    Hook(
        "calling_thread",
        "a number in torch's thread-local state",
        "`phase`, `memory_context`",
        "never, torch cannot; it calls nothing",
    ),
)
