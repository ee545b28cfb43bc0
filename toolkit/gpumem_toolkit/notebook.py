"""Magics for Jupyter and IPython: `%load_ext gpumem_toolkit.notebook`.

`%gpumem` shows the GPU memory and the names that hold it, `%%gpumem` what a cell takes and leaves behind, and
`%gpumem clear` releases what only outputs and the last error keep. A cell that runs out of memory shows a diagnosis.
"""

from __future__ import annotations

import ast
import inspect
import sys
import traceback
from collections.abc import Iterator
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class
from IPython.display import display

from gpumem_client import clear_cache, memory_summary
from gpumem_client.guest_safety import guest_safety, log
from gpumem_client.hooks.out_of_memory import chain, out_of_memory_in
from gpumem_client.phases.measured_block import Measured, MemoryUse
from gpumem_client.torch_access import initialized_torch
from gpumem_client.wire.units import human_bytes
from gpumem_toolkit.measure.named_holders import holders_among
from gpumem_toolkit.oom.guard import clear_frames, oom_guard


@magics_class
class GpuMemMagics(Magics):
    """The magics of one shell."""

    shell: Any

    @line_cell_magic
    def gpumem(self, line: str, cell: str | None = None) -> Any:
        """Show the GPU memory (`%gpumem`), what a cell takes (`%%gpumem`), or release the history (`%gpumem clear`)."""
        if cell is not None:
            return self._measure(cell)
        if line.strip() == "clear":
            print(f"released {human_bytes(self._clear())}")  # noqa: T201 - the output of a magic
        elif line.strip():
            raise ValueError(f"invalid argument {line.strip()!r}: expected nothing or 'clear'")
        else:
            display(memory_summary(), holders_among(_names(self.shell)))
        return None

    def _measure(self, cell: str) -> Any:
        """Run a cell as the shell does, and show its cost. Returns the value of its last line."""
        shell, used, result = self.shell, list[MemoryUse](), None
        source = shell.transform_cell(cell)
        if shell.should_run_async(cell, transformed_cell=source):
            raise UsageError("%%gpumem cannot measure a cell that awaits: call asyncio.run in a thread, or use %gpumem")
        tree = shell.transform_ast(shell.compile.ast_parse(source))
        last = ast.Expression(tree.body.pop().value) if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        file = shell.compile.cache(source, shell.execution_count)
        before = holders_among(_names(shell))
        with Measured("cell", kept=False, ended=used.append):
            exec(shell.compile(tree, file, "exec"), shell.user_ns)  # noqa: S102 - the user's cell
            if last is not None:
                result = eval(shell.compile(last, file, "eval"), shell.user_ns)  # noqa: S307
        after = holders_among([*_names(shell), (f"Out[{shell.displayhook.prompt_count}]", result)])
        display(*used, after.since(before))
        return result

    def _clear(self) -> int:
        """Forget the outputs and the last error, and release the memory that this frees. Returns the bytes."""
        shell, error = self.shell, getattr(sys, "last_value", None)
        for each in () if error is None else chain(error):
            clear_frames(each.__traceback__)
            # Before Python 3.13, a frame keeps a copy of its variables once it was read: this updates the copy.
            for frame, _ in traceback.walk_tb(each.__traceback__):
                len(frame.f_locals)
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):
            if hasattr(sys, name):
                setattr(sys, name, None)
        formatter = shell.InteractiveTB
        formatter.tb = formatter.value = formatter.etype = shell.last_execution_result = None
        if shell.displayhook.do_full_cache:
            shell.displayhook.flush()
            # `flush` leaves them among the names that `%who` hides.
            shell.push({name: "" for name in ("_", "__", "___") if name in shell.user_ns_hidden}, interactive=False)
        return clear_cache(collect_garbage=True)

    def after_cell(self, result: Any) -> None:
        """Show a diagnosis if a cell ran out of memory. The shell has shown the error."""
        error = result.error_in_exec
        if error is None or initialized_torch() is None or out_of_memory_in(error) is None:
            return
        with guest_safety(lambda own: log.warning("an out-of-memory error has no diagnosis: %r", own)):
            guard = oom_guard(clean=False)
            guard.__exit__(type(error), error, error.__traceback__)
            names = [*_names(self.shell), *_variables(error)]
            display(*filter(None, [guard.diagnosis]), memory_summary(), holders_among(names))
            print("%gpumem clear releases what only the outputs and the last error hold")  # noqa: T201


def _names(shell: Any) -> Iterator[tuple[str, Any]]:
    """Yield the user's variables, then the outputs, then names such as `_`."""
    names = [(name, value) for name, value in shell.user_ns.items() if name not in ("In", "Out", "_ih", "_oh")]
    yield from (each for each in names if not each[0].startswith("_"))
    yield from ((f"Out[{number}]", value) for number, value in dict(shell.user_ns.get("_oh", {})).items())
    yield from (each for each in names if each[0].startswith("_"))


def _variables(error: BaseException) -> Iterator[tuple[str, Any]]:
    """Yield the variables of the functions in the traceback of an error."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # other code has the notebook's variables
            yield from (
                (f"error: {frame.f_code.co_name}.{name}", value) for name, value in dict(frame.f_locals).items()
            )


def load_ipython_extension(shell: Any) -> None:
    """Register the magics and the diagnosis, as `%load_ext` requires."""
    magics = GpuMemMagics(shell)
    shell.register_magics(magics)
    shell.events.register("post_run_cell", magics.after_cell)
