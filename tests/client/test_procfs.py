"""Descriptions of command lines, and the parsing of /proc/PID/stat."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumem_client.wire import procfs
from gpumem_client.wire.procfs import describe_command, parse_stat, pid_namespace, split_cmdline, start_time_ticks
from gpumem_client.wire.protocol import MAX_LABEL_LENGTH


@pytest.mark.parametrize(
    ("argv", "described"),
    [
        (["python", "train.py", "--token", "x"], "python train.py"),
        (["/usr/bin/python3.11", "/srv/jobs/train.py", "--token=x"], "python3.11 train.py"),
        (["python", "-m", "pkg.mod", "--key", "secret"], "python -m pkg.mod"),
        (["python", "-mpkg.mod", "--key", "secret"], "python -m pkg.mod"),
        (["python", "-c", "token = 'secret'"], "python -c"),
        (["python", "-uctoken = 'secret'"], "python -c"),
        (["python", "-u", "-X", "dev", "-W", "ignore", "train.py", "x"], "python train.py"),
        (["python", "--check-hash-based-pycs", "never", "--", "train.py", "x"], "python train.py"),
        (["python", "-", "secret"], "python -"),
        (["python", "project/", "x"], "python project"),
        (["python"], "python"),
        (["pypy3", "train.py"], "pypy3 train.py"),
        (["pythonista", "secret"], "pythonista"),
        (["/opt/My App/bin/trtllm-serve", "--key", "secret"], "trtllm-serve"),
        (["bash", "run.sh", "secret"], "bash"),
        (["python train.py --token secret"], "python train.py"),
        (["VLLM::Worker_TP0 secret"], "VLLM::Worker_TP0"),
        (["ends\nhere", "x"], "ends?here"),
        (["\udcff", "x"], "?"),
        (["", "secret"], ""),
        ([], ""),
    ],
)
def test_a_command_is_its_program_and_script_without_arguments(argv: list[str], described: str) -> None:
    assert describe_command(argv) == described


@given(st.binary())
def test_a_description_is_always_a_valid_label(cmdline: bytes) -> None:
    described = describe_command(split_cmdline(cmdline))
    assert len(described) <= MAX_LABEL_LENGTH
    assert described.isprintable()
    described.encode("utf-8")


@given(
    program=st.sampled_from(["python", "python3.12", "/usr/bin/python3", "trainer", "python train.py"]),
    before=st.lists(st.sampled_from(["-u", "-B", "-Xdev"])),
    after=st.lists(st.text("0123456789", min_size=8)),
)
def test_nothing_after_the_script_is_ever_included(program: str, before: list[str], after: list[str]) -> None:
    described = describe_command([program, *before, "train.py", *after])
    assert not any(argument in described for argument in after)


def test_a_command_line_is_split_at_nuls_and_padding_is_dropped() -> None:
    assert split_cmdline(b"python\0train.py\0") == ["python", "train.py"]
    assert split_cmdline(b"title\0\0\0\0") == ["title"]
    assert split_cmdline(b"python\0\0x\0") == ["python", "", "x"]
    assert split_cmdline(b"\xff\0") == ["\N{REPLACEMENT CHARACTER}"]
    assert split_cmdline(b"") == []


def test_state_and_start_time_are_found_after_a_name_with_parentheses() -> None:
    fields = " ".join(str(number) for number in range(4, 53))
    stat = f"4711 (a) R) (b ) S {fields}\n"
    assert parse_stat(stat) == ("S", 4, 14 + 15, 22)


@pytest.mark.parametrize("text", ["", "4711 (short) S 1 2", "no parenthesis " * 30])
def test_an_invalid_stat_line_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="stat"):
        parse_stat(text)


def test_unreadable_values_are_zero() -> None:
    assert start_time_ticks("/proc/0") == 0
    assert pid_namespace("/proc/0") == 0


def test_a_process_and_its_host_describe_its_command_identically() -> None:
    cmdline = Path("/proc/self/cmdline").read_bytes()
    assert describe_command(split_cmdline(cmdline)) == describe_command(sys.orig_argv)


def test_a_preloaded_library_that_answers_for_nvml_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    preload = tmp_path / "ld.so.preload"
    assert procfs.nvml_interceptor(str(preload)) == ""
    preload.write_text("/usr/local/vgpu/libvgpu.so\n")
    procfs.nvml_interceptor.cache_clear()
    assert procfs.nvml_interceptor(str(preload)) == "libvgpu.so"
    preload.unlink()
    monkeypatch.setenv("LD_PRELOAD", "/usr/local/vgpu/libvgpu.so")
    procfs.nvml_interceptor.cache_clear()
    assert procfs.nvml_interceptor(str(preload)) == "libvgpu.so"
    procfs.nvml_interceptor.cache_clear()
