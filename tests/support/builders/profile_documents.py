"""Profiles as a reporter sends them, a reporter that takes profiles on command, and profiles of what people look at."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from gpumem_client.profile.profile_types import FORMAT, Frame, Owner, Profile, ProfiledDevice, Row
from gpumem_client.wire.http import Answer
from gpumem_client.wire.protocol import PROFILES_PATH, CommandResult, OutOfMemory, ProcessIdentity, Report, to_wire
from gpumem_exporter.core.container import HERE
from gpumem_exporter.features.profiles.stored_profile import KeptDevice, ProfileFacts, StoredProfile
from tests.support.builders.builders import MIB, UUIDS, report
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


# Profiles for tests of what people see of them


TORCH = "/venv/lib/python3.12/site-packages/torch/nn/modules"
SCRIPT = "/src/train.py"
MAIN = Frame("main", SCRIPT, 40)
STEP = Frame("train_step", SCRIPT, 21)
FORWARD = Frame("forward", "/src/model.py", 12)
LINEAR = Frame("forward", f"{TORCH}/linear.py", 125)
CALL = Frame("_call_impl", f"{TORCH}/module.py", 1790)

Block = tuple[int, Sequence[Frame], Owner | None, int, int | None]
"""Device, stack with the innermost frame first, owner, live bytes, bytes at the highest moment."""


def made_up(blocks: Iterable[Block], *, recorded: bool = True, pool: str = "default", **changes: Any) -> Profile:
    """Return a profile of these blocks: each is one block of its row."""
    stacks: dict[tuple[int, ...], int] = {}
    frames: dict[Frame, int] = {}
    owners: dict[Owner, int] = {}
    rows = []
    for device, stack, owner, live, peak in blocks:
        indices = tuple(frames.setdefault(frame, len(frames)) for frame in stack)
        place = stacks.setdefault(indices, len(stacks)) if indices else None
        holder = None if owner is None else owners.setdefault(owner, len(owners))
        rows.append(
            Row(device, pool, place, holder, live, int(live > 0), peak, None if peak is None else int(peak > 0))
        )
    count = max((row.device for row in rows), default=0) + 1
    lives = [sum(row.live_bytes for row in rows if row.device == i) for i in range(count)]
    peaks = [sum(row.peak_bytes or 0 for row in rows if row.device == i) for i in range(count)]
    devices = tuple(
        ProfiledDevice(UUIDS[i], lives[i], lives[i] + 64 * MIB, peaks[i] if recorded else None, 12, 16 * MIB)
        for i in range(count)
    )
    default: dict[str, Any] = {"id": "a" * 32, "cause": "action", "recorded_seconds": 30.0 if recorded else 0.0}
    return Profile(
        **{**default, **changes},
        devices=devices,
        rows=tuple(rows),
        stacks=tuple(stacks),
        frames=tuple(frames),
        owners=tuple(owners),
    )


def training(*, leaked: int = 300, layers: int = 12) -> Profile:
    """Return the profile of a training with a list that keeps `leaked` outputs, of 1 MiB each."""
    blocks: list[Block] = []
    for i in range(layers):
        for name, mib in (("attn.qkv.weight", 24), ("attn.proj.weight", 8), ("mlp.fc.weight", 32), ("norm.weight", 1)):
            path, shape, size = f"model.layers.{i}.{name}", f"{mib * 256}x2048", mib * MIB
            blocks += [
                (0, (), Owner("parameters", path, shape, "bfloat16"), size, size),
                (0, (), Owner("gradients", path, shape, "bfloat16"), 0 if i % 2 else size, size),
                (0, (), Owner("optimizer_state", f"AdamW.exp_avg {path}", shape, "float32"), 2 * size, 2 * size),
                (0, (), Owner("optimizer_state", f"AdamW.exp_avg_sq {path}", shape, "float32"), 2 * size, 2 * size),
            ]
        blocks.append((0, (LINEAR, CALL, FORWARD._replace(line=12 + i), CALL, STEP, MAIN), None, 0, 96 * MIB))
    keeps = Owner("tensors", "list of 300 in outputs, a global of __main__", "256x1024", "float32")
    batch = Owner("tensors", "local variable batch at train.py:40 in main", "64x1024", "int64")
    leak = (LINEAR, CALL, FORWARD._replace(line=30), CALL, STEP, MAIN)
    blocks += [
        (0, leak, keeps, leaked * MIB, leaked * MIB),
        (0, (Frame("load", "/src/data.py", 77), MAIN), batch, 5 * MIB, 5 * MIB),
        (0, (), Owner("backward"), 12 * MIB, 120 * MIB),
        (0, (), Owner("unseen"), 3 * MIB, 3 * MIB),
    ]
    return made_up(blocks, step=1200, pause_seconds=0.012)


def many_stacks(stacks: int = 5000, depth: int = 30) -> Profile:
    """Return the profile of a program with a tree of calls that allocate everywhere."""
    blocks: list[Block] = []
    for i in range(stacks):
        calls, number = [], i
        for level in range(depth):
            calls.append(Frame(f"call_{level}_{number % 3}", f"/src/module_{level % 7}.py", number % 3 * 10 + level))
            number = number // 3 if level % 3 == 0 else number
        blocks.append(
            (0, (LINEAR, Frame(f"leaf_{i}", SCRIPT, i + 1), *reversed(calls), MAIN), None, (i % 97 + 1) * 512, None)
        )
    return made_up(blocks, recorded=False)


def stored(profile: Profile, **changes: Any) -> StoredProfile:
    """Return a profile as the exporter keeps it."""
    known: dict[str, Any] = {
        "time_unix_seconds": 1_790_000_000.0,
        "cause": profile.cause,
        "pid": 4711,
        "workload": "llm-pretrain",
        "rank": "0",
        "command": "train.py",
        "job": "llm-pretrain",
        "devices": tuple(
            KeptDevice(each.uuid, str(i), each.allocated_bytes, each.peak_bytes)
            for i, each in enumerate(profile.devices)
        ),
        "recorded_seconds": profile.recorded_seconds,
        "step": profile.step,
        "oom_number": profile.oom_number,
    }
    return StoredProfile(facts(profile.id, **known | changes), profile)
