"""Facts of processes from the real /proc for this process and its children, and from an artificial one for others."""

from __future__ import annotations

import dataclasses
import os
import pwd
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpumem_client.wire.procfs import pid_namespace, start_time_ticks
from gpumem_client.wire.protocol import ProcessIdentity
from gpumem_exporter.core.readings import NodeReading, ProcessFacts
from gpumem_exporter.node.linux import LinuxHost
from gpumem_exporter.node.pid_namespaces import DriverPids
from gpumem_exporter.node.proc_entries import ProcEntries
from tests.support.builders.builders import UUIDS, Clock, device, node
from tests.support.builders.proc_tree import Tree

ID = "0123456789abcdef" * 4

ME = ProcessIdentity(
    pid=os.getpid(),
    start_time_ticks=start_time_ticks(),
    pid_namespace=pid_namespace(),
    session="s",
    session_started_seconds=1.0,
)


def facts_of_host(host: LinuxHost, pid: int = 30) -> ProcessFacts:
    facts = host.facts(pid)
    assert facts is not None
    return facts


def facts_of(tree: Tree, pid: int = 30) -> ProcessFacts:
    return facts_of_host(LinuxHost(tree.root), pid)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A child process that runs until its standard input ends."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", "import sys; print('here'); sys.stdin.read()", "--token", "secret"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()  # directly after exec, /proc has no command line yet
    yield process
    process.kill()
    process.communicate()


def end_unreaped(process: subprocess.Popen[bytes]) -> None:
    """End a process and leave it as a zombie."""
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def test_a_real_process_is_alive_until_it_exits_even_as_a_zombie(child: subprocess.Popen[bytes]) -> None:
    host = LinuxHost()
    started = start_time_ticks(f"/proc/{child.pid}")
    assert host.alive(child.pid, started)
    assert not host.alive(child.pid, started + 1)
    assert host.facts(child.pid) is not None
    end_unreaped(child)
    assert not host.alive(child.pid, started)
    child.wait()
    assert not host.alive(child.pid, started)
    assert host.facts(child.pid) is None


@pytest.mark.parametrize(
    ("uid", "cgroup", "user"),
    [
        (1000, "0::/user.slice/user-1000.slice/session-1.scope\n", "name-of-1000"),
        (0, f"0::/system.slice/docker-{ID}.scope\n", ""),
        (1000, f"0::/kubepods.slice/cri-containerd-{ID}.scope\n", ""),
        (100_999, f"0::/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope\n", "name-of-1000"),
    ],
    ids=["host", "docker", "pod", "rootless podman"],
)
def test_the_user_of_a_process_is_a_user_of_this_machine(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, uid: int, cgroup: str, user: str
) -> None:
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_name=f"name-of-{uid}"))
    folder = tree.process(30, uid=uid, cgroup=cgroup)
    for each in (tree.root / "1", folder):
        (each / "uid_map").write_text("0 0 4294967295\n")
    assert (facts_of(tree).user, facts_of(tree).uid) == (user, uid)


def test_facts_are_read_again_after_a_minute_and_a_user_name_once_its_directory_service_answers(
    tree: Tree, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up: list[int] = []
    names: dict[int, pwd.struct_passwd] = {}

    def directory(uid: int) -> pwd.struct_passwd:
        looked_up.append(uid)
        return names[uid]

    monkeypatch.setattr(pwd, "getpwuid", directory)
    tree.process(30, uid=3_999_999_999)
    tree.process(31, uid=3_999_999_999)
    host = LinuxHost(tree.root, clock=clock)

    def users() -> list[str]:
        return [facts_of_host(host, pid).user for pid in (30, 31)]

    assert users() == ["3999999999"] * 2
    assert looked_up == [3_999_999_999], "a directory that does not answer is queried again for each process"
    (tree.root / "30" / "cmdline").write_bytes(b"python\0serve.py\0")
    clock.now += 59
    assert facts_of_host(host).command == "python train.py", "cached for a minute"
    names[3_999_999_999] = pwd.struct_passwd(("ada", "x", 3_999_999_999, 100, "", "/", "/bin/sh"))
    clock.now += 2
    assert users() == ["ada"] * 2
    assert facts_of_host(host).command == "python serve.py"


def test_facts_are_read_again_after_a_real_exec() -> None:
    code = (
        "import os, sys; print('ready', flush=True); sys.stdin.readline();"
        " os.execv(sys.executable, [sys.executable, '-c', sys.argv[1]])"
    )
    after = "import sys; print('after', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-X", "dev", "-Wignore", "-c", code, after], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        # The kernel closes Popen's pipe before it has set up the stack that identifies the program.
        assert process.stdout.readline() == b"ready\n"
        host = LinuxHost()
        before, program = host.facts(process.pid), host.program(process.pid)
        assert before is not None
        assert host.facts(process.pid) is before
        process.stdin.write(b"go\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"after\n"
        after_exec = host.facts(process.pid)
        assert after_exec is not None
        assert after_exec is not before
        assert after_exec.start_time_ticks == before.start_time_ticks
        assert host.program(process.pid) != program
        process.kill()


@pytest.mark.parametrize(
    ("environ", "slurm", "ray"),
    [
        (b"PATH=/bin\0SLURM_JOB_ID=4242\0SLURM_JOB_ACCOUNT=lab\0RAY_JOB_ID=01000000\0SECRET=x\0", "4242", "01000000"),
        (b"MY_SLURM_JOB_ID=1\0NOTE=SLURM_JOB_ID=2\0SLURM_JOB_ID_OLD=3\0", "", ""),
        (b"X=" + b"x" * 1_000_000 + b"\0SLURM_JOB_ID=\0RAY_JOB_ID=" + b"9" * 1000 + b"\0", "", "9" * 128),
        (b"RAY_JOB_ID=\xff\0", "", "\ufffd"),
        (b"RAY_JOB_ID=ffffffff\0", "", ""),
    ],
)
def test_only_the_jobs_of_slurm_and_ray_are_read_from_the_environment(
    tree: Tree, environ: bytes, slurm: str, ray: str
) -> None:
    tree.process(30, environ=environ)
    facts = facts_of(tree)
    assert (facts.slurm_job_id, facts.ray_job_id) == (slurm, ray)
    assert facts.slurm_account == ("lab" if b"ACCOUNT=lab" in environ else "")
    assert facts.command == "python train.py"


SPAWNED = (
    b"python\0-c\0from multiprocessing.spawn import spawn_main; spawn_main(pipe_handle=7)\0--multiprocessing-fork\0"
)
SERVER = b"python\0-c\0from multiprocessing.forkserver import main; main(8, 9)\0"


def test_a_worker_of_multiprocessing_has_the_command_of_the_script_that_started_it(tree: Tree) -> None:
    tree.process(20)
    tree.process(30, cmdline=SPAWNED, parent=20)
    tree.process(40, cmdline=SERVER, parent=20)
    tree.process(41, cmdline=SERVER, parent=40)
    tree.process(50, name="systemd", cmdline=b"/sbin/init\0")
    tree.process(51, cmdline=SPAWNED, parent=50)
    tree.process(52, cmdline=SPAWNED, parent=99)
    tree.process(53, cmdline=SPAWNED, parent=53)
    commands = {pid: facts.command for pid in (30, 41, 51, 52, 53) if (facts := LinuxHost(tree.root).facts(pid))}
    assert commands == {30: "python train.py", 41: "python train.py", **dict.fromkeys((51, 52, 53), "python -c")}


@pytest.mark.parametrize(
    ("hidden", "lost"),
    [
        ("cmdline", {"command": "python"}),
        ("cgroup", {"container_id": ""}),
        ("status", {"uid": None}),
        ("stat", {"start_time_ticks": 0}),
        ("comm", {}),
        ("environ", {"slurm_job_id": ""}),
    ],
)
def test_an_unreadable_file_affects_only_its_own_facts(tree: Tree, hidden: str, lost: dict[str, object]) -> None:
    tree.process(30, uid=os.geteuid(), cgroup=f"0::/docker/{ID}\n", environ=b"SLURM_JOB_ID=7\0")
    whole = facts_of(tree)
    tree.hide(30, hidden)
    assert whole.container_id == ID
    assert facts_of(tree) == replace(whole, **lost)  # type: ignore[arg-type]


@pytest.mark.parametrize("end", ["\r", "\v", "\x85"])
def test_a_process_cannot_name_another_user_in_its_name(tree: Tree, end: str) -> None:
    tree.process(30, name=f"{end}Uid:\t7\t7\t7", uid=os.geteuid())
    assert facts_of(tree).uid == os.geteuid()


def test_a_different_start_time_means_another_process() -> None:
    host = LinuxHost()
    assert host.host_pid(ME, None) == os.getpid()
    assert host.host_pid(replace(ME, start_time_ticks=ME.start_time_ticks + 1), None) is None
    assert host.host_pid(replace(ME, start_time_ticks=ME.start_time_ticks + 1), os.getpid()) is None
    assert host.host_pid(replace(ME, start_time_ticks=0), os.getpid()) is None


def test_the_peer_pid_is_used_if_the_peer_is_the_reported_process(tree: Tree) -> None:
    for pid in (300, 301):
        (tree.process(pid, inner_pids=(7,), start=100) / "ns/pid").unlink()  # the namespace is not readable
    host = LinuxHost(tree.root)
    inside = replace(ME, pid=7, pid_namespace=tree.namespace("container"), start_time_ticks=100)
    assert host.host_pid(inside, 0) is None
    assert host.host_pid(inside, 301) == 301
    for other in (replace(inside, start_time_ticks=5), replace(inside, pid=8), replace(inside, pid=301)):
        assert host.host_pid(other, 301) is None
    tree.process(302, inner_pids=(7,), start=101, namespace="own")
    assert host.host_pid(replace(inside, start_time_ticks=101), 302) is None, "a peer in another namespace"


def reporter(tree: Tree, *, pid: int, namespace: str, start: int = 100) -> ProcessIdentity:
    return replace(ME, pid=pid, pid_namespace=tree.namespace(namespace), start_time_ticks=start)


def test_a_process_of_another_namespace_is_found_by_its_pid_there(tree: Tree) -> None:
    for name in ("a", "b"):
        tree.namespace(name)
    tree.process(300, namespace="a", inner_pids=(7,), start=100)
    tree.process(301, namespace="b", inner_pids=(7,), start=100)
    tree.process(302, namespace="b", inner_pids=(12, 8), start=100)
    tree.process(7, start=100)
    tree.process(299, namespace="a", inner_pids=(6,))
    tree.hide(299, "stat")
    host = LinuxHost(tree.root)
    assert host.host_pid(reporter(tree, pid=7, namespace="a"), None) == 300
    assert host.host_pid(reporter(tree, pid=7, namespace="b"), None) == 301
    assert host.host_pid(reporter(tree, pid=8, namespace="b"), None) == 302
    assert host.host_pid(reporter(tree, pid=7, namespace="own"), None) == 7
    for pid, namespace in ((6, "a"), (8, "a"), (12, "b"), (300, "a")):
        assert host.host_pid(reporter(tree, pid=pid, namespace=namespace), None) is None
    assert host.host_pid(reporter(tree, pid=7, namespace="a", start=101), None) is None


def test_proc_is_scanned_once_a_second_at_most(tree: Tree, clock: Clock) -> None:
    tree.namespace("a")
    host = LinuxHost(tree.root, clock=clock)
    for pid in (7, *range(500)):
        assert host.host_pid(reporter(tree, pid=pid, namespace="a"), None) is None
    tree.process(300, namespace="a", inner_pids=(7,))
    tree.process(301, namespace="a", inner_pids=(777,))
    tree.process(302, namespace="a", inner_pids=(778,))
    assert host.host_pid(reporter(tree, pid=777, namespace="a"), None) is None  # /proc was scanned in this second
    clock.now += 1
    assert host.host_pid(reporter(tree, pid=778, namespace="a"), None) == 302
    assert host.host_pid(reporter(tree, pid=7, namespace="a"), None) == 300
    clock.now += 1000
    assert host.host_pid(reporter(tree, pid=7, namespace="a"), None) == 300


def test_reports_that_arrive_together_cost_one_scan(tree: Tree, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    scans = []

    def slow(_: ProcEntries) -> list[str]:
        scans.append(clock.now)
        time.sleep(0.1)
        return []

    monkeypatch.setattr(ProcEntries, "pids", slow)
    host = LinuxHost(tree.root, clock=clock)
    identities = [reporter(tree, pid=pid, namespace="a") for pid in range(4)]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(host.host_pid, identities, [None] * 4)) == [None] * 4
    assert scans == [clock.now]


def reading(*listed: int, visible: tuple[int, ...] = ()) -> NodeReading:
    """A poll of two devices. The driver lists these pids on the first; the exporter sees the visible ones."""
    devices = (device(UUIDS[0], processes=dict.fromkeys(listed, 1)), device(UUIDS[1], gpu="1", processes={}))
    return dataclasses.replace(node(*devices), facts={pid: ProcessFacts(pid, 1) for pid in visible})


@pytest.mark.parametrize(
    "unmatched", [reading(), reading(31337), reading(31337, 7, visible=(7,))], ids=["none", "foreign", "one by chance"]
)
def test_lists_that_cannot_be_matched_are_unknown(unmatched: NodeReading) -> None:
    pids = DriverPids()
    shown = pids.check(unmatched)
    assert [each.processes for each in shown.devices] == [None, None]
    assert [each.memory for each in shown.devices] == [each.memory for each in unmatched.devices]
    assert not shown.facts
    assert not pids.matched


def test_pids_stay_matched_from_the_first_list_of_visible_processes() -> None:
    pids = DriverPids()
    pids.check(reading())
    for later in (reading(7, 8, visible=(7, 8)), reading(), reading(7, 9, visible=(7,))):  # 9 exited
        assert pids.check(later) is later
        assert pids.matched


def test_the_cgroup_of_a_slurm_job_outranks_the_environment(tree: Tree) -> None:
    claim = b"SLURM_JOB_ID=4711\0"
    ours = "0::/system.slice/slurmstepd.scope/job_12/step_0\n"
    tree.process(30, cgroup="0::/user.slice/user-1001.slice/session-1.scope\n", environ=claim)
    tree.process(31, cgroup=ours, environ=claim)
    tree.process(32, cgroup=f"0::/docker/{ID}\n", environ=claim)
    host = LinuxHost(tree.root)
    # Slurm may put no process into a cgroup.
    assert (host.slurm_job(30), host.slurm_job(None)) == (None, None)
    assert facts_of_host(LinuxHost(tree.root), 30).slurm_job_id == "4711"
    assert facts_of_host(host, 31).slurm_job_id == host.slurm_job(31) == "12"
    assert facts_of_host(host, 30).slurm_job_id == host.slurm_job(30) == host.slurm_job(None) == ""
    assert facts_of_host(host, 32).slurm_job_id == "4711"
    assert host.slurm_job(32) is None


def test_a_process_whose_files_are_all_unreadable_is_alive(tree: Tree) -> None:
    tree.process(31, cmdline=b"", name="kworker")
    assert facts_of(tree, 31).command == "kworker"
    tree.process(30)
    tree.hide(30, "cmdline", "cgroup", "status", "stat", "comm")
    host = LinuxHost(tree.root)
    assert host.facts(30) == ProcessFacts(30, 0, "", pwd.getpwuid(os.geteuid()).pw_name)
    assert host.alive(30, 100)
