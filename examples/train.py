"""A training loop with the three lines that report its memory, marked 1 to 3.

    python examples/train.py

Trains a small language model on random tokens, on the GPU if there is one. Without an exporter or without a GPU the
three lines do nothing.
"""

import argparse

import torch
from torch import nn

import gpumem_client as gpumem


class Model(nn.Module):
    """A Transformer encoder that predicts the next token."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, nhead=8, dim_feedforward=4 * width, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        return self.head(self.encoder(self.embedding(tokens), mask=mask, is_causal=True))


def train(steps: int, batch: int, length: int, width: int, layers: int) -> float:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    vocabulary = 4096
    model = Model(vocabulary, width, layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    loss = torch.tensor(float("nan"))
    for step in range(steps):
        tokens = torch.randint(vocabulary, (batch, length + 1), device=device)
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        gpumem.step()  # 2: count a step
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.3f}", flush=True)
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small language model on random tokens, and report.")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    arguments = parser.parse_args()

    gpumem.start(workload="example")  # 1: start reporting, once a second
    train(arguments.steps, arguments.batch, arguments.length, arguments.width, arguments.layers)
    gpumem.stop()  # 3: stop reporting; optional, because the end of the process stops it too


if __name__ == "__main__":
    main()
