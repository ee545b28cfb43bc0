"""Keeps profiles: in memory, or in files below the folder of `--storage.path`.

A file has one line of JSON, the facts, and then the profile as the reporter sent it. A start reads the first lines
only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json

from gpumem_exporter.core.shares import Shares
from gpumem_exporter.errors import ProfileInvalidError
from gpumem_exporter.features.profiles.profile_document import OUT_OF_MEMORY
from gpumem_exporter.features.profiles.stored_profile import ProfileFacts, StoredProfile
from gpumem_exporter.node.failures import FailureLog
from gpumem_exporter.settings import PROFILES_SHARE

FOLDER_NAME = "profiles"
MAX_IN_MEMORY = 8
"""The maximum number of profiles without a folder, and of profiles that the disk does not take."""
_MAX_FILES = 4096
_MAX_LINE = 256 << 10
_ID = re.compile(r"[0-9a-f]{32}")
_SUFFIX, _NEW = ".profile", ".new"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Entry:
    facts: ProfileFacts
    body: bytes | None
    """None if it is in its file."""


class Profiles:
    """The profiles that are kept. Thread-safe. Methods that use the disk are called in a thread."""

    def __init__(self, folder: Path | None, *, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = None if folder is None else folder / FOLDER_NAME
        self._max_bytes = max_bytes // PROFILES_SHARE
        self._failures = FailureLog(_log, clock)
        # Held while the entries change; never during an operation of the disk.
        self._lock = threading.Lock()
        self._disk = threading.Lock()
        # By id, the oldest first, and the id of the profile of an out-of-memory error by share, session and number.
        # Replaced, never changed.
        self._entries: Mapping[str, _Entry] = {}
        self._of_errors: Mapping[tuple[str, str, int | None], str] = {}

    def load(self) -> None:
        """Find the files of earlier runs. Files of other programs and damaged ones are logged and stay."""
        if self._folder is None:
            return
        with self._disk:
            found = sorted(self._found(self._folder), key=lambda facts: facts.time_unix_seconds)
            # Profiles may arrive while the folder is read: they are newer than all files.
            self._change(lambda entries: {facts.id: _Entry(facts, None) for facts in found} | dict(entries))
            self._make_room()

    def put(self, facts: ProfileFacts, body: bytes) -> None:
        """Keep a profile. If the disk fails, it is kept in memory."""
        with self._disk:
            # Readers need the body while the file is being written.
            self._change(lambda entries: {**entries, facts.id: _Entry(facts, body)})
            if self._folder is not None:
                try:
                    _write(self._path(facts.id), facts, body)
                except OSError as error:
                    self._failures.failed("profiles", f"{self._folder}: {error.strerror or error}; kept in memory")
                else:
                    self._failures.recovered("profiles")
                    self._change(lambda entries: {**entries, facts.id: _Entry(facts, None)})
            self._make_room()

    def read(self, profile_id: str) -> StoredProfile | None:
        """Return a profile with its rows; None if it is unknown, or if its file cannot be read any more."""
        entry = self._entries.get(profile_id)
        if entry is None:
            return None
        try:
            body = entry.body if entry.body is not None else self._path(profile_id).read_bytes().partition(b"\n")[2]
            return StoredProfile.of(entry.facts, body)
        except (OSError, ProfileInvalidError) as error:
            _log.warning("a profile cannot be read", extra={"fields": {"id": profile_id, "error": str(error)}})
            # Other errors pass, such as too many open files.
            if isinstance(error, FileNotFoundError | ProfileInvalidError):
                self._remove([profile_id])
            return None

    def forget(self, *profile_ids: str) -> None:
        """Delete profiles; unknown ids are ignored."""
        with self._disk:
            self._unlink(self._remove(profile_ids))

    def facts(self, profile_id: str) -> ProfileFacts | None:
        """Return what is known about a profile; None if it is unknown. Does not use the disk."""
        entry = self._entries.get(profile_id)
        return None if entry is None else entry.facts

    def of_error(self, share: str, session: str, number: int) -> ProfileFacts | None:
        """Return the profile of an out-of-memory error; None if there is none. Does not use the disk."""
        return self.facts(self._of_errors.get((share, session, number), ""))

    def newest_first(self) -> list[ProfileFacts]:
        """Return what is known about each profile. Does not use the disk."""
        facts = (entry.facts for entry in self._entries.values())
        return sorted(facts, key=lambda each: each.time_unix_seconds, reverse=True)

    def _found(self, folder: Path) -> list[ProfileFacts]:
        found = []
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for path in folder.iterdir():
                if path.name.endswith(_NEW):
                    path.unlink()
                elif (facts := _facts_of(path)) is not None:
                    found.append(facts)
        except OSError as error:
            self._failures.failed("profiles", f"{folder}: {error.strerror or error}")
        return found

    def _change(self, change: Callable[[Mapping[str, _Entry]], Mapping[str, _Entry]]) -> None:
        with self._lock:
            self._entries = change(self._entries)
            facts = [entry.facts for entry in self._entries.values() if entry.facts.oom_number is not None]
            self._of_errors = {(each.share, each.session, each.oom_number): each.id for each in facts}

    def _remove(self, profile_ids: Iterable[str]) -> list[_Entry]:
        """Remove entries, and return those that were known."""
        lost = [entry for each in profile_ids if (entry := self._entries.get(each)) is not None]
        ids = {entry.facts.id for entry in lost}
        self._change(lambda entries: {key: entry for key, entry in entries.items() if key not in ids})
        return lost

    def _make_room(self) -> None:
        """Remove profiles until the others fit."""
        while (victim := self._victim()) is not None:
            _log.debug("profile %s makes room", victim)
            self._unlink(self._remove([victim]))

    def _victim(self) -> str | None:
        """Return the profile that makes room for others; None if all fit."""
        least, entries = self._max_bytes // _MAX_FILES, self._entries.values()
        in_memory = [(entry.facts, 1) for entry in entries if entry.body is not None]
        in_files = [(entry.facts, max(entry.facts.size_bytes, least)) for entry in entries if entry.body is None]
        for sizes, limit in ((in_memory, MAX_IN_MEMORY), (in_files, self._max_bytes)):
            shares = Shares(limit)
            for facts, size in sizes:
                shares.put(facts.share, size)
            if (loser := shares.over()) is not None:
                own = [facts for facts, _ in sizes if facts.share == loser]
                # A job that runs out of memory every minute would otherwise push out everything else.
                errors = [facts for facts in own if facts.cause == OUT_OF_MEMORY]
                sessions = Counter(facts.session for facts in errors)
                return next((facts for facts in errors if sessions[facts.session] > 1), own[0]).id
        return None

    def _unlink(self, lost: Iterable[_Entry]) -> None:
        for entry in lost:
            if entry.body is None:
                with contextlib.suppress(OSError):
                    self._path(entry.facts.id).unlink()

    def _path(self, profile_id: str) -> Path:
        return (self._folder or Path()) / f"{profile_id}{_SUFFIX}"


@cache
def _facts_adapter() -> TypeAdapter[ProfileFacts]:
    return TypeAdapter(ProfileFacts)  # takes 3 ms, of no use to an exporter without profiles


def _facts_of(path: Path) -> ProfileFacts | None:
    """Return the facts in a file; None, and a line in the log, if the file is not a profile."""
    error = "another program wrote it, or it is damaged"
    try:
        with path.open("rb") as file:
            facts = _facts_adapter().validate_json(file.readline(_MAX_LINE), strict=True)
            size = os.fstat(file.fileno()).st_size - file.tell()
        if (path.name, size) == (f"{facts.id}{_SUFFIX}", facts.size_bytes) and _ID.fullmatch(facts.id):
            return facts
    except ValidationError:
        pass
    except OSError as failure:
        error = str(failure)
    _log.warning("a file is not a profile", extra={"fields": {"file": str(path), "error": error}})
    return None


def _write(path: Path, facts: ProfileFacts, body: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Written under another name, synced and renamed: a file is complete or absent.
    new = path.with_name(path.name + _NEW)
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(to_json(asdict(facts)) + b"\n" + body)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink()
        raise
