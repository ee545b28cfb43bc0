from __future__ import annotations

from pathlib import Path

import pytest

from gpumem_exporter.nvml.driver_library import open_driver_files

MAPS = """\
00400000-00452000 r-xp 00000000 08:02 173521 /usr/bin/python3
7f0c1a000000-7f0c1a021000 rw-p 00000000 00:00 0
{}
7ffc5b2e5000-7ffc5b306000 rw-p 00000000 00:00 0 [stack]
"""


@pytest.fixture
def process(tmp_path: Path) -> Path:
    (tmp_path / "fd").mkdir()
    (tmp_path / "fd" / "0").symlink_to("/dev/null")
    (tmp_path / "fd" / "5").symlink_to("socket:[4711]")
    (tmp_path / "maps").write_text(MAPS.format(""))
    return tmp_path


def test_a_process_without_the_driver_has_no_driver_files_open(process: Path) -> None:
    assert open_driver_files(process) == ()


def test_open_and_mapped_device_files_and_the_library_are_listed_once(process: Path) -> None:
    for number, target in (("6", "/dev/nvidiactl"), ("7", "/dev/nvidia0"), ("8", "/dev/nvidia0")):
        (process / "fd" / number).symlink_to(target)
    library = "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.159.04"
    lines = [
        f"7f0c1b000000-7f0c1b021000 r-xp 00000000 08:02 99 {library}",
        f"7f0c1b021000-7f0c1b022000 rw-p 00000000 08:02 99 {library}",
        "7f0c1c000000-7f0c1c001000 rw-s 00000000 00:06 12 /dev/nvidia-uvm",
    ]
    (process / "maps").write_text(MAPS.format("\n".join(lines)))
    assert open_driver_files(process) == ("/dev/nvidia-uvm", "/dev/nvidia0", "/dev/nvidiactl", library)


def test_a_library_that_was_replaced_on_disk_is_still_listed(process: Path) -> None:
    line = "7f0c1b000000-7f0c1b021000 r-xp 00000000 08:02 99 /usr/lib/libnvidia-ml.so.1 (deleted)"
    (process / "maps").write_text(MAPS.format(line))
    assert open_driver_files(process) == ("/usr/lib/libnvidia-ml.so.1 (deleted)",)
