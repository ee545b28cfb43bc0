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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gpumem_exporter.core.shares import Shares
from gpumem_exporter.errors import ProfileInvalidError
from gpumem_exporter.features.profiles.profile_document import facts_line, read_facts, read_profile
from gpumem_exporter.features.profiles.stored_profile import OUT_OF_MEMORY, ProfileFacts, StoredProfile
from gpumem_exporter.node.failures import FailureLog
from gpumem_exporter.settings import PROFILES_SHARE

FOLDER_NAME = "profiles"
MAX_IN_MEMORY = 8
"""The maximum number of profiles without a folder, and of profiles that the disk does not take."""
_MAX_FILES = 4096
_MAX_LINE = 256 << 10
_NAME = re.compile(r"([0-9a-f]{32})\.profile")
_NEW = ".new"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Entry:
    facts: ProfileFacts
    body: bytes | None
    """None if it is in its file."""


class Profiles:
    """The profiles that are kept. Thread-safe; `load`, `put` and `read` use the disk: call them in a thread."""

    def __init__(self, folder: Path | None, *, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = None if folder is None else folder / FOLDER_NAME
        self._max_bytes = max_bytes // PROFILES_SHARE
        self._failures = FailureLog(_log, clock)
        # Held while the entries change; never during an operation of the disk.
        self._lock = threading.Lock()
        self._disk = threading.Lock()
        # By id, the oldest first.
        self._entries: dict[str, _Entry] = {}
        # The id of the profile of an out-of-memory error, by share, session and number.
        self._of_errors: dict[tuple[str, str, int], str] = {}

    def load(self) -> None:
        """Find the files of earlier runs. Files of other programs and damaged ones are logged and stay."""
        if self._folder is None:
            return
        with self._disk:
            found = sorted(self._found(self._folder), key=lambda facts: facts.time_unix_seconds)
            # Profiles may arrive while the folder is read: they are newer than all files.
            with self._lock:
                newer = self._entries
                self._entries = {facts.id: _Entry(facts, None) for facts in found} | newer
                for facts in found:
                    self._note_error(facts)
            self._make_room()

    def put(self, facts: ProfileFacts, body: bytes) -> None:
        """Keep a profile. If the disk fails, it is kept in memory."""
        with self._disk:
            with self._lock:  # readers need the body while the file is being written
                self._entries[facts.id] = _Entry(facts, body)
                self._note_error(facts)
            if self._folder is not None:
                try:
                    _write(self._path(facts.id), facts, body)
                except OSError as error:
                    self._failures.failed("profiles", f"{self._folder}: {error.strerror or error}; kept in memory")
                else:
                    self._failures.recovered("profiles")
                    with self._lock:
                        self._entries[facts.id] = _Entry(facts, None)
            self._make_room()

    def read(self, profile_id: str) -> StoredProfile | None:
        """Return a profile with its rows; None if it is unknown, or if its file cannot be read any more."""
        entry = self._entries.get(profile_id)
        if entry is None:
            return None
        try:
            body = entry.body if entry.body is not None else self._path(profile_id).read_bytes().partition(b"\n")[2]
            return stored_profile(entry.facts, body)
        except (OSError, ProfileInvalidError) as error:
            _log.warning("a profile cannot be read", extra={"fields": {"id": profile_id, "error": str(error)}})
            # Other errors pass, such as too many open files.
            if isinstance(error, FileNotFoundError | ProfileInvalidError):
                with self._lock:
                    self._removed(profile_id)
            return None

    def forget(self, *profile_ids: str) -> None:
        """Delete profiles; unknown ids are ignored."""
        with self._disk:
            with self._lock:
                lost = [entry for each in profile_ids for entry in self._removed(each)]
            self._unlink(lost)

    def facts(self, profile_id: str) -> ProfileFacts | None:
        """Return what is known about a profile; None if it is unknown. Does not use the disk."""
        entry = self._entries.get(profile_id)
        return None if entry is None else entry.facts

    def of_error(self, share: str, session: str, number: int) -> ProfileFacts | None:
        """Return the profile of an out-of-memory error; None if there is none. Does not use the disk."""
        return self.facts(self._of_errors.get((share, session, number), ""))

    def newest_first(self) -> list[ProfileFacts]:
        """Return what is known about each profile. Does not use the disk."""
        with self._lock:
            facts = [entry.facts for entry in self._entries.values()]
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

    def _make_room(self) -> None:
        """Remove profiles until the others fit."""
        lost: list[_Entry] = []
        with self._lock:
            while (victim := self._victim()) is not None:
                _log.debug("profile %s makes room", victim)
                lost += self._removed(victim)
        self._unlink(lost)

    def _victim(self) -> str | None:
        """Return the profile that makes room for others; None if all fit."""
        least = self._max_bytes // _MAX_FILES
        in_memory = {each.facts.id: 1 for each in self._entries.values() if each.body is not None}
        in_files = {
            each.facts.id: max(each.facts.size_bytes, least) for each in self._entries.values() if each.body is None
        }
        for sizes, limit in ((in_memory, MAX_IN_MEMORY), (in_files, self._max_bytes)):
            shares = Shares(limit)
            for profile_id, size in sizes.items():
                shares.put(self._entries[profile_id].facts.share, size)
            if (loser := shares.over()) is not None:
                own = [each for each in sizes if self._entries[each].facts.share == loser]
                return next(self._first_victims(own), own[0])
        return None

    def _first_victims(self, own: Iterable[str]) -> Iterator[str]:
        """Yield the profiles of a share that are lost before requested ones."""
        facts = [self._entries[each].facts for each in own]
        # A job that runs out of memory every minute would otherwise push out everything else.
        sessions = Counter(each.session for each in facts if each.cause == OUT_OF_MEMORY)
        yield from (each.id for each in facts if each.cause == OUT_OF_MEMORY and sessions[each.session] > 1)

    def _note_error(self, facts: ProfileFacts) -> None:
        if facts.oom_number is not None:
            self._of_errors[facts.share, facts.session, facts.oom_number] = facts.id

    def _removed(self, profile_id: str) -> list[_Entry]:
        """Remove an entry and return it; empty if there is none."""
        entry = self._entries.pop(profile_id, None)
        if entry is None:
            return []
        if entry.facts.oom_number is not None:
            self._of_errors.pop((entry.facts.share, entry.facts.session, entry.facts.oom_number), None)
        return [entry]

    def _unlink(self, lost: Iterable[_Entry]) -> None:
        for entry in lost:
            if entry.body is None:
                with contextlib.suppress(OSError):
                    self._path(entry.facts.id).unlink()

    def _path(self, profile_id: str) -> Path:
        return (self._folder or Path()) / f"{profile_id}.profile"


def stored_profile(facts: ProfileFacts, body: bytes) -> StoredProfile:
    """Return a profile with its rows. Raises ProfileInvalidError."""
    _, profile = read_profile(body)
    if [device.uuid for device in facts.devices] != [device.uuid for device in profile.devices]:
        raise ProfileInvalidError("devices: differ from the devices in the facts")
    return StoredProfile(facts, profile)


def _facts_of(path: Path) -> ProfileFacts | None:
    """Return the facts in a file; None, and a line in the log, if the file is not a profile."""
    error = "another program wrote it, or it is damaged"
    try:
        with path.open("rb") as file:
            facts = read_facts(file.readline(_MAX_LINE))
            size = os.fstat(file.fileno()).st_size - file.tell()
        name = _NAME.fullmatch(path.name)
        if name is not None and (name[1], size) == (facts.id, facts.size_bytes):
            return facts
    except (OSError, ProfileInvalidError) as failure:
        error = str(failure)
    _log.warning("a file is not a profile", extra={"fields": {"file": str(path), "error": error}})
    return None


def _write(path: Path, facts: ProfileFacts, body: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Written under another name, synced and renamed: a file is complete or absent.
    new = path.with_name(path.name + _NEW)
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(facts_line(facts) + body)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink()
        raise
