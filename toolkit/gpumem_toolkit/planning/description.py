"""A decoder-only transformer, described by its dimensions instead of by code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from gpumem_client.wire.errors import ConfigurationError
from gpumem_toolkit.planning.job import Job, parse_tensor

__all__ = ["Description"]

_HEAD = 64


@dataclass(frozen=True, slots=True)
class Description:
    """The dimensions of a transformer.

    Attributes:
        layers: blocks of attention and feed-forward.
        hidden: the model's width.
        sequence: tokens of one sample.
        parameters: total number of parameters; None means a feed-forward part of four times the width.
        vocabulary: number of different tokens. The output shares the weights of the embedding.
        heads: number of attention heads; None means heads of width 64, at least one.
    """

    layers: int
    hidden: int
    sequence: int
    parameters: int | None = None
    vocabulary: int = 32000
    heads: int | None = None

    def job(self, **options: Any) -> Job:
        """Return the job that trains the transformer to predict the next token, with these options of Job.

        Raises:
            ConfigurationError: the dimensions contradict each other.
        """
        make: Callable[[], Any] = partial(
            _make, self.layers, self.hidden, self._heads(), self._feed_forward(), self.vocabulary
        )
        tokens = parse_tensor(f"int64[B,{self.sequence}]")
        return Job(make, (tokens,), (parse_tensor(f"int64[B*{self.sequence}]"),), **options)

    def _heads(self) -> int:
        for name in ("layers", "hidden", "sequence", "vocabulary"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"invalid {name} {getattr(self, name)}: it must be at least 1")
        heads = self.heads if self.heads is not None else max(1, self.hidden // _HEAD)
        if heads < 1 or self.hidden % heads:
            raise ConfigurationError(f"hidden {self.hidden} is not divisible by {heads} heads")
        return heads

    def _feed_forward(self) -> int:
        """Return the width of the feed-forward part that results in the number of parameters."""
        if self.parameters is None:
            return 4 * self.hidden
        # In each block attention has 4h² parameters and the feed-forward part 2hw. The norms are small.
        rest = self.parameters - self.vocabulary * self.hidden - 4 * self.layers * self.hidden**2
        width = rest // (2 * self.layers * self.hidden)
        if width < 1:
            raise ConfigurationError(
                f"{self.parameters} parameters are too few for {self.layers} layers of width {self.hidden} "
                f"and a vocabulary of {self.vocabulary}"
            )
        return width


def _make(layers: int, hidden: int, heads: int, wide: int, vocabulary: int) -> Any:
    from gpumem_toolkit.planning.model import Decoder  # imports torch

    return Decoder(layers, hidden, heads, wide, vocabulary)
