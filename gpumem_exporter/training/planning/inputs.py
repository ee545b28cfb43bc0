"""How a tensor is written in words: `float32[B,3,224,224]`, `int64[B*512]`, with the batch size as `B`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpumem_exporter.errors import ConfigurationError

__all__ = ["TensorSpec", "parse_tensor"]

_PLAIN = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
_SHORT = {"double": "float64", "float": "float32", "half": "float16", "fp32": "float32", "fp16": "float16"}
_DTYPES = {name: name for name in _PLAIN} | _SHORT | {"bf16": "bfloat16", "long": "int64", "int": "int32"}
_TENSOR = re.compile(r"\s*(?:(?P<name>\w+)\s*=)?\s*(?P<dtype>\w+)\s*\[(?P<shape>[^\[\]]*)\]\s*")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor whose shape may depend on the batch size.

    Attributes:
        dtype: torch's name of it (`bfloat16`).
        shape: each dimension as (factor, whether it is multiplied by the batch size).
        name: the keyword that it is passed by; empty: by position.
    """

    dtype: str
    shape: tuple[tuple[int, bool], ...]
    name: str = ""

    def at(self, batch: int) -> tuple[int, ...]:
        """The shape with that batch size."""
        return tuple(factor * batch if scaled else factor for factor, scaled in self.shape)


def parse_tensor(text: str) -> TensorSpec:
    """Read `[name=]dtype[dimension, …]`; a dimension is a number, `B`, or a product such as `B*512`.

    Raises:
        ConfigurationError: it is not written like that; says what would be right.
    """
    match = _TENSOR.fullmatch(text)
    if match is None:
        raise ConfigurationError(f"{text!r} is no tensor; write one as float32[B,3,224,224] or tokens=int64[B,1024]")
    dtype = _DTYPES.get(match["dtype"])
    if dtype is None:
        raise ConfigurationError(f"{match['dtype']!r} in {text!r} is no dtype; they are {', '.join(sorted(_DTYPES))}")
    words = [word.strip() for word in match["shape"].split(",")] if match["shape"].strip() else []
    return TensorSpec(dtype, tuple(_dimension(word, text) for word in words), match["name"] or "")


def _dimension(word: str, text: str) -> tuple[int, bool]:
    factor, batches = 1, 0
    for part in word.split("*"):
        part = part.strip()
        if part in ("B", "b"):
            batches += 1
        elif part.isdecimal() and int(part) > 0:
            factor *= int(part)
        else:
            raise ConfigurationError(f"dimension {word!r} in {text!r} is neither a number nor B nor a product of both")
    if batches > 1:
        raise ConfigurationError(f"dimension {word!r} in {text!r} holds the batch size more than once")
    return factor, batches == 1
