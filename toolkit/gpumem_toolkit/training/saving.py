"""Writes a checkpoint completely or not at all, in a file that loads into host memory on any machine."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import secrets
import stat
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from gpumem_client.torch_access import remove_from_serialization_registry
from gpumem_client.wire.errors import ConfigurationError, StorageError
from gpumem_client.wire.units import ShownAsText, human_bytes

_log = logging.getLogger("gpumem_toolkit")
# Lower than the priorities of torch's taggers (10 and up). Must be unique: torch cannot sort equal priorities.
_PRIORITY = -9844

_GATHER = (
    "gather the state on all ranks"
    " (torch.distributed.checkpoint.state_dict.get_model_state_dict, get_optimizer_state_dict,"
    " with StateDictOptions(full_state_dict=True, cpu_offload=True)) and save it on one rank, or save the parts with"
    " torch.distributed.checkpoint.save"
)


@dataclass(frozen=True, slots=True)
class SavedCheckpoint(ShownAsText):
    """The cost of a checkpoint."""

    path: Path
    """The file, with links resolved."""
    file_bytes: int
    duration_seconds: float
    """Seconds until the file was synced to the disk."""

    def __str__(self) -> str:
        return f"{self.path}: {human_bytes(self.file_bytes)} in {self.duration_seconds:.1f} s"


def save_checkpoint(path: str | os.PathLike[str], /, **parts: Any) -> SavedCheckpoint:
    """Save a checkpoint: `save_checkpoint("last.pt", model=model, optimizer=optimizer, step=step)`.

    The file contains a dictionary of the given names. An object with a `state_dict` is saved as its state, everything
    else as it is. `torch.load(path, weights_only=True)` reads the file into host memory on any machine.

    Takes no device memory: storages are copied to the host one by one. As with `torch.save`, a view saves its whole
    storage; `.clone()` saves the view alone. The file is written under another name in the same folder, synced to the
    disk and renamed, and keeps the permissions of the file that it replaces. After an error the previous file stays. A
    killed process leaves a hidden `.part` file.

    Any thread may call this. If several processes train the same model, only one of them should call it. Raises
    ConfigurationError if there is nothing to save; a part is a DTensor or contains a FullyShardedDataParallel; an
    object cannot be loaded with `weights_only=True`; the path is not a file. Raises StorageError if the file cannot be
    written.
    """
    if not parts:
        raise ConfigurationError("nothing to save: write save_checkpoint(path, model=model)")
    target = Path(os.path.realpath(path))
    mode = _mode(target)
    started = time.monotonic()
    _refuse_collective(parts)
    states = {name: getattr(value, "state_dict", None) for name, value in parts.items() if not isinstance(value, type)}
    tree = {name: state() if callable(state := states.get(name)) else value for name, value in parts.items()}
    _refuse_shards(tree)
    saved = SavedCheckpoint(target, _write(tree, target, mode), time.monotonic() - started)
    _log.info("saved %s", saved)
    return saved


def _write(tree: Mapping[str, Any], target: Path, mode: int | None) -> int:
    """Write a checkpoint and return its size in bytes. After an error no part of it remains."""
    import torch

    # Under another name first: `torch.save` overwrites the previous checkpoint, so that a full disk or a killed job
    # destroys both.
    handled = sys.exc_info()[1]
    part = target.with_name(f".{target.name[:40]}.{secrets.token_hex(4)}.part")
    file: _File | None = None
    try:
        with _File(
            part, "xb", opener=lambda path, flags: os.open(path, flags, 0o666 if mode is None else mode)
        ) as file:
            if mode is not None:
                with contextlib.suppress(OSError):  # a file system without permissions
                    part.chmod(mode)
            # Otherwise the file would load CUDA tensors onto the device, and a machine without a GPU could not load it.
            with _tagger.saving():
                torch.save(tree, cast(IO[bytes], file))
            _refuse_unloadable(part)
            os.fsync(file.fileno())
        written_bytes = part.stat().st_size
        part.replace(target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            part.unlink()
        # Torch replaces a write error by its own error.
        cause = file.error if file is not None and file.error is not None else error
        if isinstance(cause, OSError):
            raise StorageError(f"{target} cannot be written: {cause.strerror or cause}") from cause
        context = error.__context__  # torch's RuntimeError must not replace a KeyboardInterrupt
        if context is not handled and not isinstance(context, Exception | None):
            raise context from None
        raise
    _sync_folder(target.parent)
    return written_bytes


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # not every file system can sync folders
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _refuse_collective(parts: Mapping[str, Any]) -> None:
    """Refuse a `FullyShardedDataParallel`."""
    # Its `state_dict` waits for all ranks, and only one process saves.
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    if kind is None:
        return
    for name, part in parts.items():
        modules = getattr(part, "modules", None)
        if callable(modules) and any(isinstance(module, kind) for module in modules()):
            raise ConfigurationError(
                f"{name} contains a FullyShardedDataParallel, and this process has only a part of it: {_GATHER}"
            )


def _refuse_shards(tree: Any) -> None:
    """Refuse a DTensor, of which this process has only a part."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if kind is None:
        return
    for name, value in _leaves(tree, ""):
        if isinstance(value, kind):
            raise ConfigurationError(f"{name} is a DTensor, and this process has only a part of it: {_GATHER}")


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
    """Refuse a file that `torch.load(weights_only=True)` rejects. Reads the pickle in the file and no tensors."""
    import torch

    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(part)
    if unsafe:
        raise ConfigurationError(
            f"{', '.join(sorted(unsafe))} cannot be loaded with weights_only=True: save numbers, strings, tensors,"
            " lists and dictionaries instead, or call torch.serialization.add_safe_globals"
        )


class _File(io.FileIO):
    """The file that torch writes to. Keeps the error of a write, because torch replaces it by its own error."""

    error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write all data."""
        rest = memoryview(data).cast("B")
        size = len(rest)
        try:
            while rest:
                rest = rest[super().write(rest) :]
        except OSError as error:
            self.error = self.error or error
            raise
        return size


def _mode(target: Path) -> int | None:
    """Return the permissions of the file to replace; None if there is no file. Refuses folders and special files."""
    try:
        mode = target.stat().st_mode
    except OSError:
        return None
    if not stat.S_ISREG(mode):
        raise ConfigurationError(f"{target} is not a regular file")
    return stat.S_IMODE(mode)


class _Tagger:
    """Makes torch save storages of a device as if they were in host memory, by its registry of storage locations.

    The entry is in the registry while any thread saves, and tags only the storages of threads that save.
    """

    def __init__(self) -> None:
        self._thread = threading.local()
        self._lock = threading.RLock()  # reentrant: a signal handler may save while its thread holds the lock
        self._users = 0
        self._registered: tuple[Any, ...] | None = None

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Tag the storages that this thread saves in the block. May be nested."""
        with self._lock:
            self._users += 1
            if self._registered is None:
                self._registered = (_PRIORITY, self._tag, lambda _storage, _location: None)  # restores no storage
                sys.modules["torch.serialization"].register_package(*self._registered)
        outer, self._thread.saves = getattr(self._thread, "saves", False), True
        try:
            yield
        finally:
            self._thread.saves = outer
            with self._lock:
                self._users -= 1
                if not self._users:
                    # Replaces the list: a thread that is saving or loading a storage continues with the old one.
                    remove_from_serialization_registry(self._registered)
                    self._registered = None

    def _tag(self, storage: Any) -> str | None:
        return "cpu" if getattr(self._thread, "saves", False) and storage.device.type != "meta" else None


_tagger = _Tagger()
