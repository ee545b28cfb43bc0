"""The decoder-only transformer of a `Description`. Imports torch."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class _Block(nn.Module):
    def __init__(self, hidden: int, heads: int, wide: int) -> None:
        super().__init__()
        self.before_attention, self.before_feed_forward = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.projections, self.output = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.up, self.down = nn.Linear(hidden, wide, bias=False), nn.Linear(wide, hidden, bias=False)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        split = self.projections(self.before_attention(x)).view(b, s, 3, self.heads, h // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).reshape(b, s, h))
        return x + self.down(functional.gelu(self.up(self.before_feed_forward(x))))


class Decoder(nn.Module):
    """The transformer of a Description: pre-norm, fused attention, output weights tied to the embedding."""

    def __init__(self, layers: int, hidden: int, heads: int, wide: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(_Block(hidden, heads, wide) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return one row of logits for each token."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.embedding.weight).flatten(0, 1)
