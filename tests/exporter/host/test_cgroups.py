"""The ids of containers and pods in the cgroups of all runtimes."""

from __future__ import annotations

import pytest

from gpumem_exporter.host.places import container_id, pod_uid, user_of_slice

ID = "3f2a9c0d" * 8
UID = "0a1b2c3d-1111-2222-3333-444455556666"
SYSTEMD_UID = UID.replace("-", "_")
STATIC_UID = "5f4dcc3b5aa765d61d8327deb882cf99"

CGROUPS = {
    "v2, systemd, containerd, burstable": (
        f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{SYSTEMD_UID}.slice/cri-containerd-{ID}.scope"
    ),
    "v2, systemd, containerd, guaranteed": (
        f"0::/kubepods.slice/kubepods-pod{SYSTEMD_UID}.slice/cri-containerd-{ID}.scope"
    ),
    "v2, systemd, CRI-O, best effort": (
        f"0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{SYSTEMD_UID}.slice/crio-{ID}.scope"
    ),
    "v2, systemd, CRI-O, its container's own cgroup": (
        f"0::/kubepods.slice/kubepods-pod{SYSTEMD_UID}.slice/crio-{ID}.scope/container"
    ),
    "v2, systemd, Docker": f"0::/kubepods.slice/kubepods-pod{SYSTEMD_UID}.slice/docker-{ID}.scope",
    "v2, cgroupfs, containerd": f"0::/kubepods/burstable/pod{UID}/{ID}",
    "v2, cgroupfs, CRI-O": f"0::/kubepods/burstable/pod{UID}/crio-{ID}",
    "v2, cgroupfs, Docker": f"0::/kubepods/besteffort/pod{UID}/{ID}",
    "v2, seen from a cgroup namespace": (
        f"0::/../../kubepods-burstable-pod{SYSTEMD_UID}.slice/cri-containerd-{ID}.scope"
    ),
    "v2, a kubelet in a container": (
        f"0::/docker/{'9' * 64}/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{SYSTEMD_UID}.slice"
        f"/cri-containerd-{ID}.scope"
    ),
    "v1, cgroupfs, Docker": (
        f"12:pids:/kubepods/burstable/pod{UID}/{ID}\n11:memory:/kubepods/burstable/pod{UID}/{ID}\n"
        f"1:name=systemd:/kubepods/burstable/pod{UID}/{ID}"
    ),
    "v1, cgroupfs, containerd": f"4:memory:/kubepods/pod{UID}/{ID}\n0::/",
    "v1, systemd, containerd": (
        "11:devices:/kubepods.slice/kubepods-burstable.slice"
        f"/kubepods-burstable-pod{SYSTEMD_UID}.slice/cri-containerd-{ID}.scope\n1:name=systemd:/"
    ),
    "v1, systemd, CRI-O": f"3:cpu,cpuacct:/kubepods.slice/kubepods-pod{SYSTEMD_UID}.slice/crio-{ID}.scope",
    "v1, containerd uses cgroupfs and the kubelet systemd": (
        f"10:cpuset:/system.slice/containerd.service/kubepods-besteffort-pod{SYSTEMD_UID}.slice:cri-containerd:{ID}"
    ),
}


@pytest.mark.parametrize("cgroup", CGROUPS.values(), ids=CGROUPS)
def test_the_pod_uid_and_the_container_id_are_read_from_the_cgroup(cgroup: str) -> None:
    assert (pod_uid(cgroup + "\n"), container_id(cgroup + "\n")) == (UID, ID)


def test_a_static_pods_uid_is_a_hash() -> None:
    for cgroup in (
        f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{STATIC_UID}.slice/cri-containerd-{ID}.scope",
        f"0::/kubepods/burstable/pod{STATIC_UID}/{ID}",
    ):
        assert (pod_uid(cgroup), container_id(cgroup)) == (STATIC_UID, ID)


@pytest.mark.parametrize(
    "cgroup",
    [
        f"0::/docker/{ID}",
        f"0::/system.slice/docker-{ID}.scope",
        f"0::/machine.slice/libpod-{ID}.scope/container",
        f"0::/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope",
        f"0::/docker/{'9' * 64}/docker/{ID}",
        f"0::/docker/{ID}/init.scope",
        f"12:cpuset:/docker/{ID}\n11:memory:/docker/{ID}\n1:name=systemd:/docker/{ID}\n0::/system.slice/containerd.service",
        f"0::/kubepods/besteffort/pod{UID[:-1]}/{ID}",
        f"0::/kubepods/besteffort/mypod{UID}/{ID}",
    ],
)
def test_a_container_outside_of_pods_has_no_pod_uid(cgroup: str) -> None:
    assert (pod_uid(cgroup + "\n"), container_id(cgroup + "\n")) == ("", ID)


@pytest.mark.parametrize(
    "cgroup",
    [
        "0::/",
        "0::/user.slice/user-1000.slice/session-3.scope",
        "0::/system.slice/slurmstepd.scope/job_77/step_0/user/task_0",
        f"0::/machine.slice/libpod-conmon-{ID}.scope",
        f"0::/kubepods.slice/crio-conmon-{ID}.scope",
        f"0::/something/{ID}0",
        f"0::/something/{ID[:32]}",
        f"0::/something/x{ID}",
        "",
        "nonsense",
    ],
)
def test_a_process_outside_of_containers_has_no_ids(cgroup: str) -> None:
    assert (pod_uid(cgroup), container_id(cgroup)) == ("", "")


@pytest.mark.parametrize("end", ["\r", "\v", "\x85"])
def test_a_container_cannot_name_another_user_in_the_name_of_a_cgroup(end: str) -> None:
    assert user_of_slice(f"0::/docker/{ID}/x{end}0::/user.slice/user-7.slice/session\n") is None
