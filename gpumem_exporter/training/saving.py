"""Writes a checkpoint whole or not at all, in a file that loads into the host's memory on any machine.

`torch.save` takes no device memory: it copies one storage at a time to the host (`torch.serialization._save`). But it
writes over the checkpoint of before, so that a full disk or a killed job leaves neither, and says `unexpected pos
8389696 vs 8389648` then; and a file of CUDA tensors loads onto the device, beside the model that is there already, and
on a machine without one not at all.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from gpumem_exporter.client.hooks.storage_tags import saved_from_host
from gpumem_exporter.client.sizes import human_bytes
from gpumem_exporter.errors import ConfigurationError, StorageError

__all__ = ["SavedCheckpoint", "save_checkpoint"]

_log = logging.getLogger("gpumem_exporter.training")

_GATHER = (
    "gather it on all ranks (torch.distributed.checkpoint.state_dict.get_model_state_dict, get_optimizer_state_dict,"
    " with StateDictOptions(full_state_dict=True, cpu_offload=True)) and save that on one, or save the parts with"
    " torch.distributed.checkpoint.save"
)
_WRITE_BYTES = 64 << 20
"""Written at a time, so that a signal is not held up until gigabytes are on the disk."""


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """What a checkpoint has cost.

    Attributes:
        path: the file, links followed.
        file_bytes: its size.
        staged_bytes: the most host memory that held device tensors at once: the largest storage; 0 where none was on a
            device.
        duration_seconds: until it was on the disk.
    """

    path: Path
    file_bytes: int
    staged_bytes: int
    duration_seconds: float

    def __str__(self) -> str:
        staged = f", {human_bytes(self.staged_bytes)} of host memory at most" if self.staged_bytes else ""
        return f"{self.path}: {human_bytes(self.file_bytes)} in {self.duration_seconds:.1f} s{staged}"


def save_checkpoint(path: str | os.PathLike[str], /, **parts: Any) -> SavedCheckpoint:
    """Save a checkpoint: `save_checkpoint("last.pt", model=model, optimizer=optimizer, step=step)`.

    The file holds a dictionary of the names given. Whatever has a `state_dict` (models, optimizers, schedulers, grad
    scalers) is saved as that, everything else as it is. `torch.load(path, weights_only=True)` reads it, on any machine,
    into the host's memory; `load_state_dict` copies from there.

    It takes no device memory: storages go to the host one by one, so that the largest is what it takes of the host's.
    What `torch.save` keeps it keeps: tensors that share a storage are written once and share it again, and of a view
    the whole storage is written (`.clone()` saves the view alone).

    The file appears whole or not at all: it is written beside its place, brought to the disk (fsync) and renamed. On
    any error the file of before stays, and nothing else does; a process that is killed meanwhile leaves a hidden
    `.part` beside it. A file that is replaced passes on its permissions.

    Logs what it took. Any thread may call it, and of several processes that train the same model one should; it waits
    for the device, as any copy to the host does.

    Raises:
        ConfigurationError: nothing to save; a DTensor or a FullyShardedDataParallel, of which this process has a part
            alone; an object that could not
            be loaded with `weights_only=True`; a path that is no file.
        StorageError: it cannot be written; says why.
    """
    import torch

    if not parts:
        raise ConfigurationError("nothing to save; name what is to be saved: save_checkpoint(path, model=model)")
    target = Path(os.path.realpath(path))
    mode = _mode(target)
    started, handled = time.monotonic(), sys.exc_info()[1]
    _refuse_collective(parts)
    tree = {name: value.state_dict() if _has_state(value) else value for name, value in parts.items()}
    _refuse_shards(tree)
    part = target.with_name(f".{target.name[:40]}.{secrets.token_hex(4)}.part")
    sizes = _Sizes()
    stream = None
    try:
        stream = _Stream(part, mode)
        with saved_from_host(sizes.note):
            torch.save(tree, cast(IO[bytes], stream))
        _refuse_unloadable(part)
        stream.finish(target)
    except BaseException as error:
        if stream is not None:
            stream.discard()
        # Torch raises an error of its own on top of the one of writing.
        cause = stream.error if stream is not None and stream.error is not None else error
        if isinstance(cause, OSError):
            room = "" if stream is None else _room(target.parent, sizes.total_bytes)
            raise StorageError(f"{target} is not written: {cause.strerror or cause}{room}") from cause
        ended = error.__context__  # what ends the program must not become torch's RuntimeError
        if ended is not handled and not isinstance(ended, Exception | None):
            raise ended from None
        raise
    saved = SavedCheckpoint(target, stream.written_bytes, sizes.staged_bytes, time.monotonic() - started)
    _log.info("saved %s", saved)
    return saved


def _has_state(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and not isinstance(value, type)


def _refuse_collective(parts: Mapping[str, Any]) -> None:
    """What gathers its state from all ranks would wait for them, and they do not come: one process saves.

    Raises:
        ConfigurationError: names the part that holds a `FullyShardedDataParallel`.
    """
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    if kind is None:
        return
    for name, part in parts.items():
        modules = getattr(part, "modules", None)
        if callable(modules) and any(isinstance(module, kind) for module in modules()):
            raise ConfigurationError(
                f"{name} has a FullyShardedDataParallel, and this process a part of it alone: {_GATHER}"
            )


def _refuse_shards(tree: Any) -> None:
    """A part of a tensor under the name of the whole is a checkpoint that nobody can load.

    Raises:
        ConfigurationError: names the tensor.
    """
    distributed = sys.modules.get("torch.distributed.tensor")
    kind = getattr(distributed, "DTensor", None)
    if kind is None:
        return
    for name, value in _leaves(tree, ""):
        if isinstance(value, kind):
            raise ConfigurationError(f"{name} is a DTensor, and this process has its own part of it alone: {_GATHER}")


def _leaves(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, f"{name}.{key}" if name else str(key))
    elif isinstance(tree, list | tuple):
        for i, value in enumerate(tree):
            yield from _leaves(value, f"{name}[{i}]")
    else:
        yield name, tree


def _refuse_unloadable(part: Path) -> None:
    """Ask torch what the file needs. Reads the pickle in it, and no tensor.

    Raises:
        ConfigurationError: names what stands in the way.
    """
    import torch

    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(part)
    if unsafe:
        raise ConfigurationError(
            f"{', '.join(sorted(unsafe))} cannot be loaded with weights_only=True: save numbers, strings, tensors and"
            " lists and dictionaries of them in its place, or allow it by torch.serialization.add_safe_globals"
        )


class _Stream:
    """The file in the making, as torch writes to it: remembers the error that torch hides behind its own.

    Args:
        part: where it is made.
        mode: its permissions; None: those of any new file.
    """

    def __init__(self, part: Path, mode: int | None) -> None:
        self._part = part
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor = os.open(part, flags, 0o666 if mode is None else mode)
        self._open = True
        self.written_bytes = 0
        self.error: OSError | None = None
        if mode is not None:
            with contextlib.suppress(OSError):  # a file system without permissions
                os.fchmod(self._descriptor, mode)

    def write(self, data: Any) -> int:
        """All of it."""
        rest = memoryview(data).cast("B")
        size = len(rest)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest[:_WRITE_BYTES]) :]
        except OSError as error:
            self.error = self.error or error
            raise
        self.written_bytes += size
        return size

    def flush(self) -> None:
        """Nothing is held back."""

    def finish(self, target: Path) -> None:
        """Bring it to the disk and to its place."""
        os.fsync(self._descriptor)
        self._close()
        self._part.replace(target)
        with contextlib.suppress(OSError):  # not every file system brings folders to the disk
            folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def discard(self) -> None:
        """As if it had never been."""
        with contextlib.suppress(OSError):
            self._close()
        with contextlib.suppress(OSError):
            self._part.unlink()

    def _close(self) -> None:
        if self._open:
            self._open = False
            os.close(self._descriptor)


def _mode(target: Path) -> int | None:
    """The permissions of the file that is to be replaced; None where there is none.

    Raises:
        ConfigurationError: it is something else.
    """
    try:
        mode = target.stat().st_mode
    except OSError:
        return None
    if not stat.S_ISREG(mode):
        raise ConfigurationError(f"{target} is no file; a checkpoint is one, so name one")
    return stat.S_IMODE(mode)


def _room(folder: Path, needed_bytes: int) -> str:
    try:
        free = human_bytes(shutil.disk_usage(folder).free)
    except OSError:
        return ""
    return f"; it needs {human_bytes(needed_bytes)}, and {free} are free there"


class _Sizes(dict[tuple[str, int], int]):
    """The bytes of the storages that are saved, by kind of device and address."""

    def note(self, storage: Any) -> None:
        """Count a storage."""
        self[storage.device.type, storage.data_ptr()] = storage.nbytes()

    @property
    def total_bytes(self) -> int:
        """Of all of them."""
        return sum(self.values())

    @property
    def staged_bytes(self) -> int:
        """Of the largest that was not in the host's memory."""
        return max((size for (kind, _), size in self.items() if kind != "cpu"), default=0)
