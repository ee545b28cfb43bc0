"""Shows results in notebooks, where the last line of a cell shows an object without `print`."""

from __future__ import annotations

from typing import Any

__all__ = ["ShownAsText"]


class ShownAsText:
    """Shows an object as its text, `str(object)`, in IPython and in notebooks. `repr(object)` keeps all values."""

    __slots__ = ()

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        # IPython prefers a class's own `__repr__`, such as a dataclass's, to an inherited `_repr_pretty_`.
        cls._repr_pretty_ = ShownAsText._repr_pretty_  # type: ignore[method-assign]

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        printer.text(str(self))

    def _repr_html_(self) -> str:
        import html  # only notebooks need it

        return f"<pre>{html.escape(str(self))}</pre>"
