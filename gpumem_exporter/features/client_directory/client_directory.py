"""`--client.directory`: puts the client of this version into a folder of the node, from which jobs import it.

    sitecustomize.py -> 0.3.0-1f3a9c0e2b44/gpumem_client/bootstrap/sitecustomize.py
    0.3.0-1f3a9c0e2b44/gpumem_client/...

A job has this folder in its PYTHONPATH, so its Python imports `sitecustomize`. Versions stay: a job keeps its own, of
which it loads a few modules only when it uses them.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.resources
import logging
import os
import stat
import tempfile
from collections.abc import Mapping
from itertools import chain
from pathlib import Path

from gpumem_client.wire.errors import GpumemError
from gpumem_client.wire.peer import user_name
from gpumem_client.wire.trust import WRITABLE_BY_OTHERS
from gpumem_exporter import __version__
from gpumem_exporter.edge.listeners import umask

_PACKAGE = "gpumem_client"
_ENTRY = f"{_PACKAGE}/bootstrap/sitecustomize.py"
_LINK = "sitecustomize.py"
# Jobs of root write bytecode. The exporter creates its folders: jobs with umask 0 would let every user write there.
_BYTECODE = "__pycache__"

_log = logging.getLogger(__name__)


class ClientDirectoryError(GpumemError):
    """The client cannot be put into the folder; the message is one line."""


def put_client(folder: Path) -> None:
    """Put the client of this exporter's version into a folder.

    Every user can read it and only the exporter's user can write to it, whatever the umask. Call it before jobs can
    connect and before threads start: it writes about 400 KiB.

    Raises:
        ClientDirectoryError: another user could change what jobs import, or the folder cannot be written.
    """
    try:
        with umask(0o022):
            _make_safe(folder)
            _make_folder(folder / _BYTECODE)
            files = _files()
            version = f"{__version__}-{hashlib.sha256(repr(files).encode()).hexdigest()[:12]}"
            if not _is_complete(folder / version, files):
                _write_version(folder, version, files)
            link, target = folder / _LINK, Path(version, _ENTRY)
            if not link.is_symlink() or link.readlink() != target:
                # A job that is starting gets all of one version: its link is replaced at once.
                new = folder / f".{_LINK}.{os.getpid()}"
                new.unlink(missing_ok=True)
                new.symlink_to(target)
                new.replace(link)
                _log.info("client installed", extra={"fields": {"directory": folder, "version": version}})
    except OSError as error:
        reason = error.strerror or str(error)
        raise ClientDirectoryError(
            f"--client.directory: cannot put the client into {folder}: {reason[:1].lower()}{reason[1:]}"
        ) from error


def _make_safe(folder: Path) -> None:
    """Make the folder if it is missing. Raises OSError if another user could replace the folder or a file in it."""
    # From the top: no other user can replace a folder whose parents and owner are checked.
    for parent in reversed(folder.parents):
        _require_own(parent, may_be_sticky=True)
    _make_folder(folder)
    _require_own(folder)
    # The folder may have been writable for others before.
    for path, *names in os.walk(folder):
        for each in (Path(path, name) for name in chain(*names)):
            with contextlib.suppress(FileNotFoundError):
                _require_own(each, may_be_link=True)
    if (folder / _LINK).exists() and not (folder / _LINK).is_symlink():
        raise OSError(0, f"{_LINK} in it is a file of another program: name an empty folder")


def _make_folder(folder: Path) -> None:
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
        folder.chmod(0o755)


def _require_own(each: Path, *, may_be_sticky: bool = False, may_be_link: bool = False) -> None:
    """Raise OSError if a user other than root and this one could replace a folder or a file, or change it."""
    status = each.lstat()
    is_link = stat.S_ISLNK(status.st_mode)
    if is_link and not may_be_link:
        raise OSError(0, f"{each} is a symbolic link: name the real folder {os.path.realpath(each)}")
    if status.st_uid not in (0, os.geteuid()):
        raise OSError(0, f"{each} belongs to {user_name(status.st_uid)}, who could change what jobs import")
    mode = stat.S_IMODE(status.st_mode)
    # In a sticky folder, such as /tmp, only the owner can replace an entry.
    if mode & WRITABLE_BY_OTHERS and not is_link and not (may_be_sticky and mode & stat.S_ISVTX):
        raise OSError(0, f"others may write to {each} (mode {mode:04o}) and change what jobs import; chmod go-w {each}")


def _files() -> dict[str, bytes]:
    """Return the text of each module of the installed client by its path."""
    package = Path(str(importlib.resources.files(_PACKAGE)))
    modules = sorted(package.rglob("*.py"))
    return {f"{_PACKAGE}/{module.relative_to(package).as_posix()}": module.read_bytes() for module in modules}


def _is_complete(version: Path, files: Mapping[str, bytes]) -> bool:
    try:
        return all((version / path).read_bytes() == text for path, text in files.items())
    except FileNotFoundError:
        return False


def _write_version(folder: Path, version: str, files: Mapping[str, bytes]) -> None:
    """Write the folder of a version."""
    # Under another name, which is replaced at the end: the folder of a version is always complete.
    with tempfile.TemporaryDirectory(prefix=".new-", dir=folder, ignore_cleanup_errors=True) as made:
        new = Path(made, "new")
        for path, text in files.items():
            file = new / path
            (file.parent / _BYTECODE).mkdir(parents=True, exist_ok=True)
            file.write_bytes(text)
        for each in (new, *new.rglob("*")):
            each.chmod(0o755 if each.is_dir() else 0o644)  # a default ACL replaces the umask
        if (folder / version).is_dir():  # with changes
            (folder / version).rename(Path(made, "changed"))
        new.rename(folder / version)
