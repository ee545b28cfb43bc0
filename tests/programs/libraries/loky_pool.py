"""A script with a pool of joblib's default backend, loky, whose workers are new interpreters."""

from __future__ import annotations

from joblib import Parallel, delayed
from statement import state, state_and_wait


def embed(number: int) -> int:
    import torch

    rows = torch.empty((number + 1) << 20, dtype=torch.uint8, device=f"cuda:{number}")
    state_and_wait("worker", number=number)
    return len(rows)


if __name__ == "__main__":
    state("parent")
    assert Parallel(n_jobs=2)(delayed(embed)(number) for number in range(2)) == [1 << 20, 2 << 20]
