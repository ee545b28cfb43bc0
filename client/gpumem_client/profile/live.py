"""A profile of what is allocated now, without a recording."""

from __future__ import annotations

from gpumem_client.profile.aggregate import Rows
from gpumem_client.profile.blocks import DeviceBlocks, Stacks
from gpumem_client.profile.heap_reader import HeapReader
from gpumem_client.profile.history import living
from gpumem_client.profile.model import Profile


def live_profile(heap: HeapReader, profile_id: str, cause: str) -> Profile:
    """Return a profile of what is allocated now. It has the stacks that the user's code records, if it does.

    Raises:
        CommandRefusedError: this allocator has no snapshot.
    """
    heap.pause_seconds = 0.0
    stacks = Stacks()
    earlier = heap.blocks(Stacks())
    devices: dict[int, DeviceBlocks] = {}
    naming, notes = heap.naming(lambda: devices.update(heap.blocks(stacks)))
    rows = Rows(stacks, [naming])
    for number, (index, blocks) in enumerate(devices.items()):
        lifetimes = living(blocks, earlier.get(index, DeviceBlocks()))
        rows.add(index, number, lifetimes, lambda _: "unseen", live_at=0)
    return Profile(
        id=profile_id,
        cause=cause,
        devices=tuple(heap.profiled(index, blocks) for index, blocks in devices.items()),
        rows=rows.finish(frozenset()),
        stacks=tuple(stacks.stacks),
        frames=tuple(stacks.frames),
        owners=tuple(rows.owners),
        pause_seconds=heap.pause_seconds,
        notes=notes,
    )
