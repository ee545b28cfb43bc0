"""Runs the cells of a notebook in a Jupyter kernel, as a notebook's server does."""

from __future__ import annotations

from jupyter_client.manager import start_new_kernel

CELLS = (
    """
import gpumem_client as gpumem
gpumem.start(workload="notebook-alice")
""",
    """
from accelerate import notebook_launcher
from accelerated_loop import main
notebook_launcher(main, num_processes=2, rdzv_backend="c10d", rdzv_endpoint="localhost:0")
""",
    """
import torch
from statement import state_and_wait
rows = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
state_and_wait("kernel")
""",
)


def main() -> None:
    manager, client = start_new_kernel()
    try:
        for cell in CELLS:
            reply = client.execute_interactive(cell)
            if reply["content"]["status"] != "ok":
                raise RuntimeError("\n".join(reply["content"]["traceback"]))
    finally:
        client.stop_channels()
        manager.shutdown_kernel()


if __name__ == "__main__":
    main()
