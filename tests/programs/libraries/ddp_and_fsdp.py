"""A script for torchrun: trains with DistributedDataParallel, then with FSDP2."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from statement import state_and_wait
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard


def train(model: nn.Module, device: torch.device) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.randn(8, 256, device=device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))


dist.init_process_group("gloo")
ranks = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank)
torch.cuda.set_device(device)

replicated = nn.parallel.DistributedDataParallel(network().to(device), device_ids=[local_rank])
optimizer = train(replicated, device)
state_and_wait("ddp", local_rank=local_rank, **ranks)
del replicated, optimizer

sharded = network().to(device)
# Without a mesh, torch 2.9 makes its own group, with NCCL.
mesh = DeviceMesh.from_group(dist.group.WORLD, "cuda")
for layer in (sharded[0], sharded[2], sharded):
    fully_shard(layer, mesh=mesh)
optimizer = train(sharded, device)
state_and_wait("fsdp", local_rank=local_rank, **ranks)
dist.destroy_process_group()
