"""The ids of containers and pods in the cgroups of all runtimes."""

from __future__ import annotations

import pytest

from gpumem_exporter.host.places import container_id, pod_uid, user_of_slice

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
        (f"/kubepods.slice/kubepods-pod{SYSTEMD_UID}.slice/crio-{ID}.scope/container", UID),
        (f"/kubepods/burstable/pod{UID}/{ID}", UID),
        (f"/kubepods/burstable/pod{UID}/crio-{ID}", UID),
        (f"/../../kubepods-burstable-pod{SYSTEMD_UID}.slice/cri-containerd-{ID}.scope", UID),
        (f"/docker/{'9' * 64}/kubelet.slice/kubelet-kubepods-pod{SYSTEMD_UID}.slice/cri-containerd-{ID}.scope", UID),
        (f"/system.slice/containerd.service/kubepods-besteffort-pod{SYSTEMD_UID}.slice:cri-containerd:{ID}", UID),
        (f"/kubepods.slice/kubepods-burstable-pod{STATIC_UID}.slice/cri-containerd-{ID}.scope", STATIC_UID),
        (f"/kubepods/burstable/pod{STATIC_UID}/{ID}", STATIC_UID),
        (f"/system.slice/docker-{ID}.scope", ""),
        (f"/docker/{'9' * 64}/docker/{ID}", ""),
        (f"/docker/{ID}/init.scope", ""),
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
