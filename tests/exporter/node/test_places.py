"""Where a process runs, by scripted files of /proc; real containers are integration tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpumem_exporter.core.container import HERE, UNKNOWN, Place
from gpumem_exporter.node.containers import Places, container_id, pod_uid, slurm_job, user_of_slice

A, B, C, D = (letter * 64 for letter in "abcd")
HOST_MAP = "         0          0 4294967295\n"
ROOTLESS_MAP = "         0       1001          1\n"


class Proc:
    """A scripted /proc with the exporter as `self`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.put("self")

    def put(
        self, pid: str, cgroup: str = "0::/\n", depth: int = 0, uid_map: str = HOST_MAP, root_mount: int = 0
    ) -> int:
        entry = self.folder / pid
        entry.mkdir(exist_ok=True)
        status = f"Name:\tx\nUid:\t1001\t1001\t1001\t1001\nNSpid:\t1{chr(9) + '1' if depth else ''}\n"
        entry.joinpath("status").write_text(status)
        entry.joinpath("uid_map").write_text(uid_map)
        entry.joinpath("cgroup").write_text(cgroup)
        mounts = "20 9 0:5 / /proc rw - proc proc rw\n"
        entry.joinpath("mountinfo").write_text(f"{mounts}{root_mount} 8 0:4 / / rw - overlay overlay rw\n")
        return int(pid) if pid.isdecimal() else 0

    def place(self, cgroup: str = "0::/\n", **changes: Any) -> Place:
        return Places(self.folder).of(self.put("7", cgroup, **changes))


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path)


def test_services_and_sessions_of_the_host_are_here(proc: Proc) -> None:
    for path in ("/", "/system.slice/sshd.service", "/user.slice/user-1001.slice/session-2.scope"):
        assert proc.place(f"0::{path}\n") == HERE
    assert proc.place(f"0::/machine.slice/libpod-conmon-{A}.scope\n") == HERE, "podman's monitor is outside"


@pytest.mark.parametrize("depth", [0, 1])
def test_a_container_is_named_by_its_cgroup_also_in_the_hosts_namespaces(proc: Proc, depth: int) -> None:
    assert proc.place(f"0::/system.slice/docker-{A}.scope\n", depth=depth) == Place(known=True, container=A)
    assert proc.place("0::" + f"/{A}" * 200 + "\n", depth=depth).container == ".".join([A] * 4)


def test_the_outer_containers_come_first_and_those_of_the_exporter_do_not_count(proc: Proc) -> None:
    """kind runs a node in a container, and pods in containers of the node."""
    assert proc.place(f"0::/docker/{A}/kubepods/{B}\n").container == f"{A}.{B}"
    proc.put("self", f"0::/docker/{A}/kubepods/{C}\n")
    assert proc.place(f"0::/docker/{A}/kubepods/{C}\n") == HERE, "kubectl exec"
    assert proc.place(f"0::/docker/{A}/init.scope\n") == HERE, "the node"
    assert proc.place(f"0::/docker/{A}/kubepods/{B}\n").container == B
    assert proc.place(f"0::/docker/{A}/kubepods/{D}/{B}\n").container == f"{D}.{B}", "a forged name"


def test_namespaces_without_a_cgroup_are_a_place_of_their_own(proc: Proc) -> None:
    first, second = (proc.place(depth=1, root_mount=number) for number in (81, 82))
    assert first.known
    assert HERE != first != second
    assert proc.place(uid_map=ROOTLESS_MAP, root_mount=83) not in (HERE, first, second)
    assert proc.place(depth=1, root_mount=81) == first


@pytest.mark.parametrize("missing", ["status", "uid_map", "cgroup"])
def test_a_process_that_the_exporter_cannot_see_is_in_an_unknown_place(proc: Proc, missing: str) -> None:
    proc.put("7")
    places = Places(proc.folder)
    (proc.folder / "7" / missing).unlink()
    assert places.of(7) == places.of(8) == UNKNOWN


def test_in_a_proc_of_another_pid_namespace_every_place_is_unknown(proc: Proc) -> None:
    proc.put("self", depth=1)
    assert proc.place() == UNKNOWN


@pytest.mark.parametrize(
    ("own", "other", "outside"),
    [
        ("/system.slice/gpumem.service", "/system.slice/containerd.service", False),  # the exporter is in no container
        (f"/kubepods/pod1/{A}", f"/kubepods/pod1/{B}", True),
        (f"/kubepods/pod1/{A}", f"/kubepods/pod1/{A}/init", False),
    ],
)
def test_whether_a_process_is_in_the_exporters_container(proc: Proc, own: str, other: str, outside: bool) -> None:
    proc.put("self", f"0::{own}\n")
    assert Places(proc.folder).is_outside_container(proc.put("7", f"0::{other}\n")) == outside


@pytest.mark.parametrize(
    ("cgroup", "user"),
    [
        (f"0::/user.slice/user-1001.slice/user@1001.service/user.slice/libpod-{A}.scope/container\n", 1001),
        (
            f"1:name=systemd:/user.slice/user-1001.slice/x\n0::/../../user.slice/user-1001.slice/docker-{A}.scope\n",
            1001,
        ),
        (f"0::/system.slice/docker-{A}.scope/user.slice/user-1001.slice/x\n", None),
        (f"0::/system.slice/own.service/user.slice/user-1001.slice/docker-{A}.scope\n", None),
    ],
)
def test_a_container_in_a_users_slice_counts_for_the_user(proc: Proc, cgroup: str, user: int | None) -> None:
    place = proc.place(cgroup)
    assert (place.container, place.user) == (A, user)
    assert place.share(0) == (f"container:{A}" if user is None else f"uid:{user}")


@pytest.mark.parametrize("uid_map", [ROOTLESS_MAP, "0 1001 1\n1 100000 65536\n", "", "0 4294967295 1\n"])
def test_namespaces_that_a_user_makes_count_for_the_user(proc: Proc, uid_map: str) -> None:
    one, other = (proc.place(depth=1, uid_map=uid_map, root_mount=number) for number in (81, 82))
    assert one != other
    assert one.share(1001) == other.share(1001) == "uid:1001"


def test_a_container_name_that_a_user_forges_is_another_place(proc: Proc) -> None:
    true, forged = (proc.place(f"0::/{above}/docker-{A}.scope\n") for above in ("x", "user.slice/user-1001.slice"))
    assert not forged.reaches(true)
    assert true.share(1001) != forged.share(1001)
    assert str(true) != str(forged), "it is a part of the names of processes"


ID = "3f2a9c0d" * 8
UID = "0a1b2c3d-1111-2222-3333-444455556666"
SYSTEMD_UID = UID.replace("-", "_")
STATIC_UID = "5f4dcc3b5aa765d61d8327deb882cf99"


@pytest.mark.parametrize(
    ("cgroup", "pod"),
    [
        # With the systemd driver, the kubelet's names are slices; with the cgroupfs driver they are plain.
        (f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{SYSTEMD_UID}.slice/crio-{ID}.scope", UID),
        (f"/kubepods.slice/kubepods-pod{SYSTEMD_UID}.slice/cri-containerd-{ID}.scope", UID),
        (f"/kubepods/burstable/pod{UID}/{ID}", UID),
        (f"/../../kubepods-burstable-pod{SYSTEMD_UID}.slice/cri-containerd-{ID}.scope", UID),
        (f"/docker/{'9' * 64}/kubelet.slice/kubelet-kubepods-pod{SYSTEMD_UID}.slice/cri-containerd-{ID}.scope", UID),
        (f"/system.slice/containerd.service/kubepods-besteffort-pod{SYSTEMD_UID}.slice:cri-containerd:{ID}", UID),
        (f"/kubepods/burstable/pod{STATIC_UID}/{ID}", STATIC_UID),
        (f"/system.slice/docker-{ID}.scope", ""),
        (f"/kubepods/besteffort/pod{UID[:-1]}/{ID}", ""),
        (f"/kubepods/besteffort/mypod{UID}/{ID}", ""),
    ],
)
@pytest.mark.parametrize("lines", ["0::{}\n", "4:memory:{}\n0::/\n", "1:name=systemd:/\n11:devices:{}"])
def test_the_container_id_and_the_pod_uid_are_read_from_the_cgroup(cgroup: str, pod: str, lines: str) -> None:
    text = lines.format(cgroup)
    assert (container_id(text), pod_uid(text)) == (ID, pod)


@pytest.mark.parametrize(
    "cgroup",
    [
        "0::/",
        "0::/user.slice/user-1000.slice/session-3.scope",
        f"0::/machine.slice/libpod-conmon-{ID}.scope",
        f"0::/something/{ID}0",
        f"0::/something/{ID[:32]}",
        f"0::/something/x{ID}",
        "nonsense",
    ],
)
def test_a_process_outside_of_containers_has_no_ids(cgroup: str) -> None:
    assert (pod_uid(cgroup), container_id(cgroup)) == ("", "")


@pytest.mark.parametrize("end", ["\r", "\v", "\x85"])
def test_a_container_cannot_name_another_user_in_the_name_of_a_cgroup(end: str) -> None:
    assert user_of_slice(f"0::/docker/{ID}/x{end}0::/user.slice/user-7.slice/session\n") is None


@pytest.mark.parametrize(
    ("path", "job"),
    [
        ("/system.slice/slurmstepd.scope/job_4711/step_0/user/task_0", "4711"),
        ("/system.slice/gpu1_slurmstepd.scope/job_4711/step_batch", "4711"),
        ("/slurm/uid_1001/job_4711/step_0/task_0", "4711"),
        ("/../../system.slice/slurmstepd.scope/job_4711/step_0", "4711"),
        ("/user.slice/user-1001.slice/slurm/uid_1001/job_4711", ""),
        ("/user.slice/user-1001.slice/system.slice/slurmstepd.scope/job_4711", ""),
        ("/docker/" + "a" * 64 + "/slurm/uid_0/job_4711", ""),
        ("/system.slice/ssh.service", ""),
    ],
)
def test_the_cgroup_of_slurmstepd_names_the_job(path: str, job: str) -> None:
    assert slurm_job(f"12:pids:/\n4:memory:{path}\n0::/\n") == job


def test_a_cgroup_outside_of_the_exporters_cgroup_namespace_is_outside_of_its_container(proc: Proc) -> None:
    (proc.folder / "self" / "ns").mkdir()
    (proc.folder / "self" / "ns" / "cgroup").touch()  # another inode than the first namespace's
    places = Places(proc.folder)
    assert places.is_outside_container(proc.put("7", "0::/../../system.slice/containerd.service\n"))
    assert not places.is_outside_container(proc.put("8", "0::/\n"))


def test_a_place_reaches_itself_and_the_host_every_place() -> None:
    one, other = (Place(known=True, container=each) for each in (A, B))
    reached = {(a, b) for a in (HERE, one, other, UNKNOWN) for b in (HERE, one, other, UNKNOWN) if a.reaches(b)}
    assert reached == {(HERE, HERE), (HERE, one), (HERE, other), (HERE, UNKNOWN), (one, one), (other, other)}
