"""The part that runs inside a PyTorch process.

    from gpumem_exporter import client as gpumem

    gpumem.start(workload="llm-pretrain")

From then on the process reports its allocator to the exporter on its node, once it has initialised CUDA, and clears
its cache when it is asked to. It needs the standard library alone, starts one thread, opens no port, initialises
nothing, resets nothing, and raises nothing into the program once `start` has returned.
"""

from __future__ import annotations

from gpumem_exporter.client._process import start, step, stop

__all__ = ["start", "step", "stop"]
