"""Profiles as a reporter sends them, and a reporter that takes profiles on command."""

from __future__ import annotations

import gzip
import json
import threading
from dataclasses import asdict
from typing import Any

from gpumem_client.profile.profile_types import FORMAT, Frame, Owner, Profile, ProfiledDevice, Row
from gpumem_client.wire.http import Answer
from gpumem_client.wire.protocol import PROFILES_PATH, CommandResult, OutOfMemory, ProcessIdentity, Report, to_wire
from gpumem_exporter.core.container import HERE
from gpumem_exporter.features.profiles.stored_profile import KeptDevice, ProfileFacts
from tests.support.builders.builders import UUIDS, report
from tests.support.servers.running_exporter import RunningExporter
from tests.support.waiting import eventually


def profile(profile_id: str = "a" * 32, cause: str = "action", **changes: Any) -> Profile:
    """Return a profile of one device with two stacks and an owner."""
    return Profile(
        **{
            "id": profile_id,
            "cause": cause,
            "devices": (ProfiledDevice(UUIDS[0], allocated_bytes=700, reserved_bytes=1000, peak_bytes=900),),
            "rows": (
                Row(0, "default", 0, None, 500, 5, 800, 8),
                Row(0, "private", 1, 0, 100, 1, 100, 1),
                Row(0, "default", None, 1, 100, 1, 0, 0),
            ),
            "stacks": ((0, 1), (1,)),
            "frames": (Frame("forward", "train.py", 41), Frame("main", "train.py", 7)),
            "owners": (Owner("parameters", "model.weight", "4x4", "float32"), Owner("unseen")),
            **changes,
        }
    )


def document(identity: ProcessIdentity, sent: Profile) -> dict[str, Any]:
    """Return a profile as JSON."""
    return {**asdict(sent), "format": FORMAT, "process": to_wire(identity)}


def body(identity: ProcessIdentity, sent: Profile) -> bytes:
    """Return a profile as the body of a request."""
    return gzip.compress(json.dumps(document(identity, sent)).encode())


def facts(profile_id: str = "b" * 32, **changes: Any) -> ProfileFacts:
    """Return what the exporter knows about a profile."""
    values: dict[str, Any] = {
        **dict.fromkeys(("workload", "rank", "command", "job", "slurm_job_id", "ray_job_id"), ""),
        **dict.fromkeys(("step", "oom_number", "owner_uid"), None),
        "time_unix_seconds": 1e9,
        "cause": "action",
        "pid": 7,
        "devices": (KeptDevice(UUIDS[0], "0", 700, 900),),
        "recorded_seconds": 0.0,
        "pid_namespace": 1,
        "reported_pid": 7,
        "start_time_ticks": 1000,
        "session": "first",
        "sent_id": "a" * 32,
        "place": HERE,
        "size_bytes": 100,
    }
    return ProfileFacts(id=profile_id, **{**values, **changes})


class Reporter:
    """A process that reports over a real connection, and takes profiles when the test says so."""

    def __init__(self, exporter: RunningExporter, pid: int = 100, **changes: Any) -> None:
        self.exporter = exporter
        self.pid = pid
        self.changes: dict[str, Any] = {"actions": ("profile",), **changes}
        self.sequence = 0
        self.report()

    @property
    def identity(self) -> ProcessIdentity:
        """The process."""
        return report(self.pid, **self.changes).process

    def report(self, **changes: Any) -> Any:
        """Report, and return the reply."""
        self.sequence += 1
        sent: Report = report(self.pid, sequence=self.sequence, **{**self.changes, **changes})
        answer = self.exporter.report(sent)
        assert answer.status == 200, answer.body
        return json.loads(answer.body)

    def send(self, sent: Profile, **headers: str) -> Answer:
        """Send a profile."""
        return self.post(body(self.identity, sent), **headers)

    def post(self, content: bytes, **headers: str) -> Answer:
        """Send the body of a profile."""
        sent: dict[str, Any] = {"Content_Encoding": "gzip", **headers}
        return self.exporter.request("POST", PROFILES_PATH, body=content, **sent)

    def command(self) -> Any:
        """Return the command to take a profile, once it has arrived."""
        return eventually(lambda: self.report().get("commands", []), bool)[0]

    def finish(self, command: Any, profile_id: str = "", outcome: str = "done", **changes: Any) -> None:
        """Report the result of a command."""
        self.report(results=(CommandResult(command["id"], outcome, profile=profile_id, **changes),))

    def fail(self, number: int) -> None:
        """Report an out-of-memory error."""
        self.report(ooms=(OutOfMemory(UUIDS[0], number, requested_bytes=100),))

    def error_profile(self, number: int) -> Profile:
        """Return the profile of an out-of-memory error."""
        return profile(f"{number:016x}", "out_of_memory", oom_number=number)


def takes(exporter: RunningExporter, *profiles: Profile, pid: int = 100) -> threading.Thread:
    """Return a started thread in which a process takes these profiles on its next commands."""
    reporter = Reporter(exporter, pid)

    def serve() -> None:
        for sent in profiles:
            command = reporter.command()
            answer = reporter.send(Profile(**{**vars(sent), "id": command["id"]}))
            reporter.finish(command, json.loads(answer.body)["id"])

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread
