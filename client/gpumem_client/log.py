"""The client's logger. It swallows the errors of logging handlers."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from gpumem_client.hooks.guest_safety import guest_safety

__all__ = ["log"]

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter


class _ErrorText:
    """The text of an error, without the error.

    A handler that keeps the error would also keep its frames and all tensors in them.
    """

    def __init__(self, error: BaseException) -> None:
        self._str, self._repr = str(error), repr(error)

    def __str__(self) -> str:
        return self._str

    def __repr__(self) -> str:
        return self._repr


class _Log(_Adapter):
    """The logger `gpumem_client`."""

    @guest_safety()
    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a record; an error of a handler is swallowed."""
        texts = [_ErrorText(each) if isinstance(each, BaseException) else each for each in args]
        # The record names the caller: skip the adapter's method, such as `warning`, and the wrapper of `guest_safety`.
        super().log(level, msg, *texts, stacklevel=kwargs.pop("stacklevel", 1) + 2, **kwargs)


log = _Log(logging.getLogger("gpumem_client"), None)
