"""Runs the cells of a notebook in a Jupyter kernel, as a notebook's server does."""

from __future__ import annotations

from jupyter_client.manager import start_new_kernel

CELLS = (
    """
import gpumem_client as gpumem
gpumem.start(workload="notebook-alice")
""",
    """
import torch
from accelerate import Accelerator, InitProcessGroupKwargs, notebook_launcher
from statement import state_and_wait

def train():
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    model = torch.nn.Linear(256, 256)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.randn(4, 256, device=accelerator.device)).sum())
    optimizer.step()
    state_and_wait("rank", rank=accelerator.process_index, world_size=accelerator.num_processes)
    accelerator.end_training()

notebook_launcher(train, num_processes=2, rdzv_backend="c10d", rdzv_endpoint="localhost:0")
""",
    """
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
