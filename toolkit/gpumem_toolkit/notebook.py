"""Magics for Jupyter and IPython: `%load_ext gpumem_toolkit.notebook`.

`%gpumem` shows the GPU memory and the names that hold it, `%%gpumem` what a cell takes and leaves behind, and
`%gpumem clear` releases what only the notebook's history keeps. A cell that runs out of memory shows a diagnosis.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from IPython.core.magic import Magics, line_cell_magic, magics_class
from IPython.display import display

from gpumem_client import clear_cache, memory_summary
from gpumem_client.guest_safety import guest_safety, log
from gpumem_client.hooks.out_of_memory import chain, out_of_memory_in
from gpumem_client.phases.measured import Measured, MemoryUse
from gpumem_client.torch_access import initialized_torch
from gpumem_client.wire.units import ShownAsText, human_bytes, human_growth
from gpumem_toolkit.measure.tensor_bytes import HOST, Storages, tensors_in
from gpumem_toolkit.oom.guard import clear_frames, oom_guard

_OWN = "error: "  # prefix of the holders in a traceback
_ROWS = 12


@dataclass(frozen=True)
class Holders(ShownAsText):
    """Bytes on all devices by the name that holds them. A tensor counts with the first of its names."""

    bytes: Mapping[str, int]
    signed: bool = False

    def __str__(self) -> str:
        rows = sorted(self.bytes.items(), key=lambda row: -abs(row[1]))
        shown = human_growth if self.signed else human_bytes
        lines = [f"{name:<24} {shown(size):>12}" for name, size in rows[:_ROWS]]
        return "\n".join(lines) if lines else "no name holds device memory"


@magics_class
class GpuMemMagics(Magics):
    """The magics of one shell."""

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
            display(memory_summary(), self.holders())
        return None

    def holders(self, error: BaseException | None = None) -> Holders:
        """Return the names of the notebook that hold device memory, and the variables in the traceback of an error."""
        torch = initialized_torch()
        if torch is None:
            return Holders({})
        found, seen = dict[str, int](), Storages(torch)
        for name, value in [*_names(self.shell), *_variables(error)]:
            with guest_safety():  # another library's class may raise
                tensors = _tensors_in(value, torch)
                sizes = Storages(torch, tensors).bytes(seen)
                size = sum(each for device, each in sizes.items() if device != HOST)
                seen.add(tensors)
                if size:
                    found[name] = found.get(name, 0) + size
        return Holders(found)

    def _measure(self, cell: str) -> Any:
        """Run a cell as the shell does, and show its cost. Returns the value of its last line, for the shell to show."""
        shell, used = self.shell, list[MemoryUse]()
        source = shell.transform_cell(cell)
        tree = shell.transform_ast(shell.compile.ast_parse(source))
        last = ast.Expression(tree.body.pop().value) if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        before, result = self.holders().bytes, None
        file = shell.compile.cache(source, shell.execution_count)
        with Measured("cell", kept=False, ended=used.append):
            exec(shell.compile(tree, file, "exec"), shell.user_ns)  # noqa: S102 - the user's cell
            if last is not None:
                result = eval(shell.compile(last, file, "eval"), shell.user_ns)  # noqa: S307
        after = self.holders().bytes
        left = {name: after.get(name, 0) - before.get(name, 0) for name in {**before, **after}}
        display(*used, Holders({name: size for name, size in left.items() if size}, signed=True))
        return result

    def _clear(self) -> int:
        """Forget the outputs and the last error, and release the memory that this frees. Returns the bytes."""
        shell = self.shell
        for each in chain(error) if (error := getattr(sys, "last_value", None)) is not None else ():
            clear_frames(each.__traceback__)
        error = None
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):
            if hasattr(sys, name):
                setattr(sys, name, None)
        formatter = shell.InteractiveTB
        formatter.tb = formatter.value = formatter.etype = None
        shell.last_execution_result = None
        shell.displayhook.flush()
        return clear_cache(collect_garbage=True)

    def after_cell(self, result: Any) -> None:
        """Show a diagnosis if a cell ran out of memory."""
        error = result.error_in_exec
        if error is None or initialized_torch() is None or out_of_memory_in(error) is None:
            return
        with guest_safety(lambda own: log.warning("an out-of-memory error has no diagnosis: %r", own)):
            guard = oom_guard(clean=False)
            guard.__exit__(type(error), error, error.__traceback__)
            display(*filter(None, [guard.diagnosis]), memory_summary(), self.holders(error))
            print("%gpumem clear releases what only the outputs and the last error hold")  # noqa: T201


def _names(shell: Any) -> Iterator[tuple[str, Any]]:
    """Yield the user's variables first, then the outputs, `_` among them."""
    own = {name: value for name, value in shell.user_ns.items() if not name.startswith("_") and name not in ("In", "Out")}
    yield from own.items()
    yield from ((f"Out[{number}]", value) for number, value in dict(shell.user_ns.get("_oh", {})).items())
    yield from ((name, value) for name, value in list(shell.user_ns.items()) if name.startswith("_") and name != "_oh")


def _variables(error: BaseException | None) -> Iterator[tuple[str, Any]]:
    step = None if error is None else error.__traceback__
    while step is not None:
        for name, value in list(step.tb_frame.f_locals.items()) if step.tb_frame.f_code.co_name != "<module>" else ():
            yield f"{_OWN}{step.tb_frame.f_code.co_name}.{name}", value
        step = step.tb_next


def _tensors_in(value: Any, torch: Any) -> list[Any]:
    """Return the tensors of a model with their gradients, of an optimizer, or in containers."""
    if isinstance(value, torch.optim.Optimizer):
        return tensors_in(list(value.state.values()), torch)
    modules = [value] if isinstance(value, torch.nn.Module) else []
    parameters = [each for module in modules for each in (*module.parameters(), *module.buffers())]
    found = parameters or tensors_in([value], torch)
    return found + [each.grad for each in found if each.is_leaf and each.grad is not None]


def load_ipython_extension(shell: Any) -> None:
    """Register the magics and the diagnosis, as `%load_ext` requires."""
    magics = GpuMemMagics(shell)
    shell.register_magics(magics)
    shell.events.register("post_run_cell", magics.after_cell)


def unload_ipython_extension(shell: Any) -> None:
    """Remove the diagnosis, as `%unload_ext` requires."""
    for callback in list(shell.events.callbacks["post_run_cell"]):
        if isinstance(getattr(callback, "__self__", None), GpuMemMagics):
            shell.events.unregister("post_run_cell", callback)
