"""The logger of what runs inside the program: whatever a handler of the program's does, it raises nothing there."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from gpumem_exporter.client.hooks.guest_safety import Swallowing

__all__ = ["log"]

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter


class _Told:
    """An error's words.

    A record that a handler keeps would keep the error, with it the frames that it came through and their callers, and
    all tensors that the program has there.
    """

    def __init__(self, error: BaseException) -> None:
        self._words = str(error), repr(error)

    def __str__(self) -> str:
        return self._words[0]

    def __repr__(self) -> str:
        return self._words[1]


class _Log(_Adapter):
    """`gpumem_exporter.client`. Only handlers of `logging` itself keep what goes wrong in them to themselves."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log, or do not."""
        with Swallowing():
            told = [_Told(each) if isinstance(each, BaseException) else each for each in args]
            super().log(level, msg, *told, stacklevel=kwargs.pop("stacklevel", 1) + 1, **kwargs)


log = _Log(logging.getLogger("gpumem_exporter.client"), None)
