"""A decoder-only transformer by its measures, for when there is no code yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpumem_exporter.errors import ConfigurationError
from gpumem_exporter.training.planning.inputs import parse_tensor
from gpumem_exporter.training.planning.job import Job

__all__ = ["Description"]

_HEAD = 64


@dataclass(frozen=True, slots=True)
class Description:
    """The measures of a transformer.

    Attributes:
        layers: blocks of attention and feed-forward.
        hidden: width.
        sequence: tokens of a sample.
        parameters: in all; None: what a feed-forward part of four times the width gives.
        vocabulary: tokens that there are; its embedding is the output's too.
        heads: of the attention; None: as many as are 64 wide, or one.
    """

    layers: int
    hidden: int
    sequence: int
    parameters: int | None = None
    vocabulary: int = 32000
    heads: int | None = None

    def job(self, **options: Any) -> Job:
        """The job that trains it on the next token; options are those of Job.

        Raises:
            ConfigurationError: the measures do not fit together.
        """
        heads, wide = self._heads(), self._feed_forward()

        def make() -> Any:
            from gpumem_exporter.training.planning.transformer import Decoder

            return Decoder(self.layers, self.hidden, heads, wide, self.vocabulary)

        tokens = parse_tensor(f"int64[B,{self.sequence}]")
        return Job(make, (tokens,), (parse_tensor(f"int64[B*{self.sequence}]"),), **options)

    def _heads(self) -> int:
        for name in ("layers", "hidden", "sequence", "vocabulary"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} {getattr(self, name)}; it must be at least 1")
        heads = self.heads if self.heads is not None else max(1, self.hidden // _HEAD)
        if heads < 1 or self.hidden % heads:
            raise ConfigurationError(f"hidden {self.hidden} does not divide into {heads} heads")
        return heads

    def _feed_forward(self) -> int:
        """The width of the feed-forward part that gives the number of parameters."""
        if self.parameters is None:
            return 4 * self.hidden
        # Attention takes 4h², the feed-forward part 2hw, of each block; embedding and norms are small beside it.
        rest = self.parameters - self.vocabulary * self.hidden - 4 * self.layers * self.hidden**2
        width = rest // (2 * self.layers * self.hidden)
        if width < 1:
            raise ConfigurationError(
                f"{self.parameters} parameters are too few for {self.layers} layers of width {self.hidden} "
                f"and a vocabulary of {self.vocabulary}"
            )
        return width
