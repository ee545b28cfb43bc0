"""A program without any code for the exporter, which caches GPU memory as an idle notebook does.

    gpumem-exporter run --workload notebook -- python examples/hoard.py

It allocates and drops tensors, so that PyTorch's cache stays full, and waits for Enter. Then run in another terminal:
`gpumem-exporter info` and `gpumem-exporter clear --workload notebook`.
"""

import argparse

import torch

MIB = 1024 * 1024


def hoard(mebibytes: int) -> torch.Tensor:
    """Fill the cache with `mebibytes` and keep one MiB of them."""
    tensors = [torch.empty(32 * MIB, dtype=torch.uint8, device="cuda") for _ in range(mebibytes // 32)]
    kept = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
    tensors.clear()
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description="Hoard cached GPU memory.")
    parser.add_argument("--mebibytes", type=int, default=2048)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this example needs a GPU")
    kept = hoard(arguments.mebibytes)
    reserved, allocated = torch.cuda.memory_reserved() // MIB, torch.cuda.memory_allocated() // MIB
    print(f"reserved {reserved} MiB, in tensors {allocated} MiB", flush=True)
    input("press Enter to end ")
    del kept


if __name__ == "__main__":
    main()
