"""Hooks into torch and the interpreter, and the boundary that keeps the client's errors from the user's code.

Every hook is installed and removed by one module here. After `client.stop()`, torch, `sys.meta_path`, `builtins`,
optimizer classes and DataLoader classes are as they were before `client.start()`.

| module           | hook                                   | installed by              | removed by                 |
| ---------------- | -------------------------------------- | ------------------------- | -------------------------- |
| `cuda_start`     | a finder on `sys.meta_path`, and       | `start()` before torch is | the import of              |
|                  | `exec_module` of the loader of         | imported                  | `torch.cuda`; `stop()`     |
|                  | `torch.cuda`                           |                           |                            |
| `cuda_start`     | a call in `torch.cuda._queued_calls`   | `start()` before CUDA     | `stop()`                   |
|                  |                                        | starts                    |                            |
| `steps`          | a post hook on the steps of all        | the first listener:       | `stop()`, if nothing else  |
|                  | optimizers                             | `start()`, `watch` and    | listens                    |
|                  |                                        | others                    |                            |
| `graph_captures` | the methods of `torch.cuda.CUDAGraph`  | `start()`, `clear_cache`  | `stop()`                   |
|                  | that start and end a capture           | and others                |                            |
| `model_forward`  | a pre hook on the forward passes of    | `milestones` of a model   | the first forward pass on  |
|                  | all modules                            | on the host               | a device, or after the end |
| `storage_tags`   | a tagger in the registry of            | `save_checkpoint`         | the end of the save        |
|                  | `torch.serialization`                  |                           |                            |
| `lifecycle`      | a call at the interpreter's exit       | `start()`                 | `stop()`                   |
| `lifecycle`      | a function of `os.register_at_fork`    | `start()`, `phase` and    | never, Python cannot; it   |
|                  |                                        | others                    | resets the phases in a     |
|                  |                                        |                           | child after `stop()`       |
| `out_of_memory`  | an observer of out-of-memory errors    | `start()`                 | never, torch cannot; does  |
|                  |                                        |                           | nothing after `stop()`     |
| `calling_thread` | a thread's number in torch's thread-   | `phase`, `memory_context` | never, torch cannot; calls |
|                  | local state                            |                           | nothing                    |

A list of hooks is not changed while a thread walks over it, since that would raise there or skip an entry
(`call_stacks`). Such a hook does nothing until it is removed: by the ending reporter for `steps`, otherwise by the next
call of its remove function.
"""
