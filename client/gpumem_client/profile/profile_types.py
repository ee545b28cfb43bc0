"""A memory profile: allocated bytes by stack and by owner, and its JSON on the wire.

The bytes of the rows of a device add up to what its allocator has allocated, at the end of the recording and at its
highest moment. A profile contains text and numbers only, so it keeps no tensor alive. It is at most
`MAX_COMPRESSED_BYTES` long: the smallest rows are merged into one row of the kind `merged` on each device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

FORMAT = 1
MAX_COMPRESSED_BYTES = 1 << 20
"""The longest profile as gzip."""
MAX_DOCUMENT_BYTES = 16 << 20
"""The longest profile as JSON."""
MAX_ROWS = 8_000
"""The maximum number of rows, besides the row of the kind `merged` on each device."""
MAX_LISTS = 32_000
"""The maximum number of lists and objects: 8,000 rows with an owner each, 5,000 stacks and 10,000 frames."""
MAX_VALUES = 320_000
"""The maximum number of commas, which the values of lists and objects have between them."""

CAUSES = ("action", "out_of_memory")

OWNER_KINDS = (
    *("parameters", "gradients", "optimizer_state", "buffers", "kv_cache"),
    "tensors",
    "backward",
    "before",
    "unsearched",
    "unseen",
    "merged",
)
"""What holds a block. The first five have the path of the module or the cache as their name. `tensors`: another tensor
that Python objects refer to, named by what refers to it; `unsearched`: what refers to it was not searched for.
The others have no Python object: `backward` was allocated by autograd's threads, `before` before the recording started,
`unseen` is anything else, such as what autograd has saved; `merged` has the smallest rows."""


class Frame(NamedTuple):
    """One frame of a Python stack."""

    function: str
    file: str
    line: int


class Owner(NamedTuple):
    """What holds a block: see `OWNER_KINDS`."""

    kind: str
    name: str = ""
    shape: str = ""
    """As in `4096x4096`; empty if it is not known."""
    dtype: str = ""


class Row(NamedTuple):
    """The blocks of one device with the same pool, stack and owner."""

    device: int
    """Index in `Profile.devices`."""
    pool: str
    """`default` or `private`."""
    stack: int | None
    """Index in `Profile.stacks`; None without a recorded stack."""
    owner: int | None
    """Index in `Profile.owners`; None if the stack alone says where the blocks come from."""
    live_bytes: int
    live_blocks: int
    peak_bytes: int | None
    """At the highest moment of the recording; None without one."""
    peak_blocks: int | None


@dataclass(frozen=True)
class ProfiledDevice:
    """One device of a profile, in bytes."""

    uuid: str
    allocated_bytes: int
    reserved_bytes: int | None = None
    peak_bytes: int | None = None
    """The most that was allocated at one time of the recording; None without a recording."""
    segments: int | None = None
    fragmented_bytes: int | None = None
    """Free bytes of segments that live blocks keep from the driver."""


@dataclass(frozen=True)
class Profile:
    """What one process has allocated."""

    id: str
    """The id of the command, or random."""
    cause: str
    """One of `CAUSES`."""
    devices: tuple[ProfiledDevice, ...]
    rows: tuple[Row, ...]
    stacks: tuple[tuple[int, ...], ...] = ()
    """Indices in `frames`, the innermost frame first."""
    frames: tuple[Frame, ...] = ()
    owners: tuple[Owner, ...] = ()
    oom_number: int | None = None
    """`OutOfMemory.number` of the error, for the cause `out_of_memory`."""
    age_seconds: float = 0.0
    """Seconds between the profile's end and its sending, on the reporter's monotonic clock."""
    recorded_seconds: float = 0.0
    """The length of the recording; 0 without one."""
    pause_seconds: float = 0.0
    """The longest time for which one call kept the interpreter from all other threads."""
    step: int | None = None
    notes: tuple[str, ...] = ()
    """What is missing and why, for people."""
