"""Which processes have lost their launcher: in an artificial /proc, what real processes of one test cannot be."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from gpumem_exporter.core.readings import LostLauncher
from gpumem_exporter.node.linux import LinuxHost
from tests.support.builders.builders import Clock
from tests.support.builders.proc_tree import Tree

CONTAINER = "0::/kubepods.slice/cri-containerd-" + "0123456789abcdef" * 4 + ".scope\n"
SPAWNED = b"python\0-c\0from multiprocessing.spawn import spawn_main; spawn_main()\0--multiprocessing-fork\0"
ENGINE = b"VLLM::EngineCore\0"
PID, PARENT, INIT = 30, 20, 10


class Bench:
    """A /proc with an init (10) and a process (30), whose parent (20) ends."""

    def __init__(self, root: Path) -> None:
        self.tree = Tree(root)
        self.clock = Clock(1000.0)
        self.host = LinuxHost(root, clock=self.clock)
        self.put(INIT, cmdline=b"/sbin/tini\0--\0python\0", parent=1)

    def put(self, pid: int, **changes: Any) -> None:
        shutil.rmtree(self.tree.root / str(pid), ignore_errors=True)
        self.tree.process(pid, **changes)

    def ends(self, pid: int, **child: Any) -> None:
        """End a process; the init adopts its child."""
        shutil.rmtree(self.tree.root / str(pid))
        self.clock.now += 1
        self.put(PID, parent=INIT, **child)

    def lost(self, pid: int = PID) -> LostLauncher | None:
        facts = self.host.facts(pid)
        assert facts is not None
        return facts.lost


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.mark.parametrize(
    ("parent", "child", "launcher"),
    [
        (b"/usr/bin/python3\0/opt/bin/torchrun\0train.py\0", b"python\0train.py\0", "python3 torchrun"),
        (b"python\0-m\0torch.distributed.run\0train.py\0", b"python\0train.py\0", "python -m torch.distributed.run"),
        (b"/ray/core/src/ray/raylet/raylet\0--node\0", b"ray::train()\0", "raylet"),
        (b"python\0train.py\0", SPAWNED, "python train.py"),
        (b"python\0/opt/bin/vllm\0serve\0", ENGINE, "python vllm"),
        (b"python\0-m\0sglang.launch_server\0", b"sglang::scheduler_TP0\0", "python -m sglang.launch_server"),
    ],
)
def test_a_process_that_depends_on_its_parent_loses_it(
    bench: Bench, parent: bytes, child: bytes, launcher: str
) -> None:
    bench.put(PARENT, cmdline=parent, parent=INIT)
    bench.put(PID, cmdline=child, parent=PARENT)
    assert bench.lost() is None
    bench.ends(PARENT, cmdline=child)
    assert bench.lost() == LostLauncher("launcher_ended", launcher, PARENT, 1001.0, 1000.0)
    bench.clock.now += 3600.0
    assert (bench.lost() or LostLauncher("")).ended_seconds == 1001.0


@pytest.mark.parametrize(
    ("parent", "child"),
    [
        (b"bash\0", b"python\0train.py\0"),
        (b"python\0/opt/bin/jupyter-lab\0", b"python\0-m\0ipykernel_launcher\0"),
        (b"python\0torchrun.py\0", b"python\0train.py\0"),
        (b"", ENGINE),
    ],
)
def test_a_process_that_may_outlive_its_parent_loses_nothing(bench: Bench, parent: bytes, child: bytes) -> None:
    bench.put(PARENT, cmdline=parent, name="", parent=INIT)
    bench.put(PID, cmdline=child, parent=PARENT)
    assert bench.lost() is None
    if child != ENGINE:  # its title is enough, below
        bench.ends(PARENT, cmdline=child)
        assert bench.lost() is None


@pytest.mark.parametrize("child", [SPAWNED, ENGINE])
def test_an_end_before_the_first_sight_is_known_by_title_and_init(bench: Bench, child: bytes) -> None:
    bench.put(PID, cmdline=child, parent=INIT)
    assert bench.lost() == LostLauncher("launcher_ended", computed_seconds=1000.0)
    bench.put(31, cmdline=b"python\0train.py\0", parent=INIT)
    assert bench.lost(31) is None
    bench.put(PARENT, cmdline=b"supervisor: python\0", parent=INIT)
    bench.put(32, cmdline=child, parent=PARENT)
    assert bench.lost(32) is None, "its parent may have started it"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root creates files of another user")
def test_the_launcher_of_another_user_makes_no_orphan(bench: Bench) -> None:
    bench.put(PARENT, cmdline=b"python\0torchrun\0", parent=INIT)
    os.chown(bench.tree.root / str(PARENT), 1001, 1001)
    bench.put(PID, cmdline=b"python\0train.py\0", parent=PARENT)
    assert bench.lost() is None
    bench.ends(PARENT, cmdline=b"python\0train.py\0")
    assert bench.lost() is None


def test_a_later_process_with_the_pid_has_lost_nothing(bench: Bench) -> None:
    bench.put(PARENT, cmdline=b"python\0torchrun\0", parent=INIT)
    bench.put(PID, cmdline=b"python\0train.py\0", parent=PARENT)
    bench.lost()
    bench.put(PID, cmdline=b"python\0other.py\0", parent=INIT, start=200)
    assert bench.lost() is None


def test_a_container_is_gone_with_its_shim(bench: Bench) -> None:
    bench.put(15, cmdline=b"/usr/bin/containerd-shim-runc-v2\0-id\0x\0", parent=INIT)
    bench.put(PARENT, cmdline=b"sh\0run.sh\0", cgroup=CONTAINER, parent=15)
    job = {"cmdline": b"python\0train.py\0", "cgroup": CONTAINER}
    bench.put(PID, parent=PARENT, **job)
    assert bench.lost() is None
    shutil.rmtree(bench.tree.root / "15")
    bench.put(PARENT, cmdline=b"sh\0run.sh\0", cgroup=CONTAINER, parent=INIT)
    found = bench.lost()
    assert found is not None
    assert (found.reason, found.command, found.pid) == ("container_gone", "containerd-shim-runc-v2", 15)


def test_an_end_inside_a_container_and_the_end_of_an_exec_are_no_end_of_the_container(bench: Bench) -> None:
    job = {"cmdline": b"python\0train.py\0", "cgroup": CONTAINER}
    bench.put(15, cmdline=b"/usr/bin/conmon\0--exec-attach\0", parent=INIT)
    bench.put(PARENT, cmdline=b"bash\0", cgroup=CONTAINER, parent=15)
    bench.put(PID, parent=PARENT, **job)
    assert bench.lost() is None
    bench.ends(PARENT, **job)
    assert bench.lost() is None
    bench.put(31, parent=15, **job)
    assert bench.lost(31) is None
    bench.put(31, parent=INIT, **job)
    assert bench.lost(31) is None


def test_the_cpu_is_measured_over_ten_seconds(bench: Bench) -> None:
    used = 0
    for share, expected in ((0.02, 1000.0), (0.06, 1020.0), (0.02, 1020.0)):
        bench.put(PID, cmdline=ENGINE, parent=INIT, cpu=used)
        bench.lost()
        bench.clock.now += 10.0
        used += int(share * 10 * os.sysconf("SC_CLK_TCK"))
        bench.put(PID, cmdline=ENGINE, parent=INIT, cpu=used)
        found = bench.lost()
        assert found is not None
        assert found.computed_seconds == expected
