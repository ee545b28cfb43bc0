"""Hooks into torch and the interpreter, and the boundary that keeps the client's errors from the user's code.

Each hook is installed and removed by one module, here or where only one module uses it; docs/reporting.md lists all
hooks. After `client.stop()`, torch, `sys.meta_path`, `builtins`, optimizer classes and DataLoader classes are as they
were before `client.start()`.

The hook on steps does not change while an optimizer iterates over the hooks, because that would raise in the optimizer.
A hook that cannot be removed at once does nothing until it is removed. The ending reporter removes the hook on steps;
the next call of the remove function removes any other hook.

Other folders import: `cuda_start`, `graph_captures`, `out_of_memory`, `process_life`, `steps`.
"""
