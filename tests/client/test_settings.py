from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpumem_client.allocator.allocator_environment import environment_limit
from gpumem_client.reporter.identity import current_process, with_rank
from gpumem_client.reporter.reporter import start_reporter
from gpumem_client.reporter.reporter_settings import ReporterSettings
from gpumem_client.wire.http import DEFAULT_URLS
from gpumem_client.wire.protocol import COMMAND_ACTIONS


def test_arguments_take_precedence_over_the_environment_and_defaults() -> None:
    environ = {"GPUMEM_WORKLOAD": "env", "GPUMEM_RANK": "7", "RANK": "8", "GPUMEM_EXPORTER_URL": "http://env:1"}
    bare = ReporterSettings.resolve(environ={})
    assert (bare.workload, bare.rank, bare.urls) == ("", "", DEFAULT_URLS)
    said = ReporterSettings.resolve(environ=environ)
    assert (said.workload, said.rank, said.urls) == ("env", "7", ("http://env:1",))
    given = ReporterSettings.resolve(workload="arg", rank=0, url="unix:///x", environ=environ)
    assert (given.workload, given.rank, given.urls) == ("arg", "0", ("unix:///x",))


def test_the_defaults_of_a_platform_come_last() -> None:
    defaults = {"GPUMEM_DEFAULT_WORKLOAD": "job-7", "GPUMEM_DEFAULT_RANK": "2"}
    alone = ReporterSettings.resolve(environ=defaults)
    assert (alone.workload, current_process(alone).rank, alone.world_size) == ("job-7", "2", None)
    launched = ReporterSettings.resolve(environ={**defaults, "GPUMEM_WORKLOAD": "a", "SLURM_PROCID": "5"})
    assert (launched.workload, current_process(launched).rank) == ("a", "5")
    given = ReporterSettings.resolve(workload="b", rank=0, environ={**defaults, "GPUMEM_INJECT": "1"})
    assert (given.workload, current_process(given).rank, given.ignored) == ("b", "0", ())


def test_below_run_its_labels_take_precedence_over_arguments() -> None:
    run = {"GPUMEM_INJECT": "1", "GPUMEM_EXPORTER_URL": "http://env:1", "RANK": "8", "WORLD_SIZE": "9"}
    named = ReporterSettings.resolve(
        workload="script", rank=0, url="unix:///x", environ={**run, "GPUMEM_WORKLOAD": "operator", "GPUMEM_RANK": "7"}
    )
    assert (named.workload, named.rank, named.world_size, named.urls) == ("operator", "7", None, ("unix:///x",))
    assert [[word for word in ("script", "operator", "0", "7") if f"{word!r}" in text] for text in named.ignored] == [
        ["script", "operator"],
        ["7"],
    ]
    unnamed = ReporterSettings.resolve(workload="script", rank=0, environ=run)
    assert (unnamed.workload, unnamed.rank, unnamed.ignored) == ("script", "0", ())
    same = ReporterSettings.resolve(workload="a", rank=7, environ={**run, "GPUMEM_WORKLOAD": "a", "GPUMEM_RANK": "7"})
    assert same.ignored == ()


@pytest.mark.parametrize(
    ("environ", "world_size"),
    [
        ({"RANK": "6", "WORLD_SIZE": "8", "SLURM_STEP_NUM_TASKS": "2"}, 8),
        ({"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "6", "SLURM_NTASKS": "12"}, 6),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "12"}, None),  # a batch script, which starts no tasks
        ({"GPUMEM_RANK": "actor", "RANK": "6", "WORLD_SIZE": "8"}, None),
        ({"RANK": "6", "WORLD_SIZE": "0"}, None),
        ({"RANK": "6", "WORLD_SIZE": "9" * 5000}, None),
        ({"WORLD_SIZE": "8"}, None),
    ],
)
def test_the_number_of_ranks_comes_from_the_same_launcher_as_the_rank(
    environ: dict[str, str], world_size: int | None
) -> None:
    assert ReporterSettings.resolve(environ=environ).world_size == world_size
    assert ReporterSettings.resolve(rank=0, environ=environ).world_size is None


@pytest.mark.parametrize(
    ("given", "environ", "expected"),
    [
        (None, {}, ("3", 4)),
        (None, {"GPUMEM_DEFAULT_RANK": "5"}, ("3", 4)),
        (None, {"RANK": "7", "WORLD_SIZE": "8", "GPUMEM_DEFAULT_RANK": "7"}, ("7", 8)),
        ("actor", {"GPUMEM_DEFAULT_RANK": "5"}, ("actor", None)),
    ],
)
def test_without_another_rank_it_is_that_of_torch_s_process_group(
    monkeypatch: pytest.MonkeyPatch, given: str | None, environ: dict[str, str], expected: tuple[str, int | None]
) -> None:
    settings = ReporterSettings.resolve(rank=given, environ=environ)
    identity = current_process(settings)
    group = {"get_rank": lambda: 3, "get_world_size": lambda: 4}
    started: list[bool] = []
    distributed = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: bool(started), **group)
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed)
    assert with_rank(identity, settings.default_rank) == identity
    started.append(True)
    named = with_rank(identity, settings.default_rank)
    assert (named.rank, named.world_size) == expected


def test_a_token_file_is_read_on_each_use(tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("first\n")
    settings = ReporterSettings.resolve(environ={"GPUMEM_REPORT_TOKEN_FILE": str(secret)})
    assert settings.authorization() == {"Authorization": "Bearer first"}
    secret.write_text("second")
    assert settings.authorization() == {"Authorization": "Bearer second"}
    assert ReporterSettings.resolve(environ={}).authorization() == {}


def test_a_disabled_reporter_installs_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(callback: object) -> None:
        raise AssertionError("a disabled reporter waits for CUDA")

    monkeypatch.setattr("gpumem_client.reporter.reporter.when_cuda_starts", refuse)
    start_reporter(ReporterSettings.resolve(environ={"GPUMEM_DISABLED": "1"}))


@pytest.mark.parametrize(
    ("environ", "index", "limit"),
    [
        ({"CUDA_DEVICE_MEMORY_LIMIT_0": "3000m"}, 0, 3000 << 20),
        ({"CUDA_DEVICE_MEMORY_LIMIT_0": "3000m"}, 1, None),
        ({"CUDA_DEVICE_MEMORY_LIMIT": "2G", "CUDA_DEVICE_MEMORY_LIMIT_1": "1g"}, 0, 2 << 30),
        ({"CUDA_DEVICE_MEMORY_LIMIT": "2G", "CUDA_DEVICE_MEMORY_LIMIT_1": "1g"}, 1, 1 << 30),
        ({"CUDA_DEVICE_MEMORY_LIMIT_1": "1g", "CUDA_VISIBLE_DEVICES": "1"}, 0, 1 << 30),
        ({"CUDA_DEVICE_MEMORY_LIMIT_0": "1g", "CUDA_VISIBLE_DEVICES": "GPU-1234"}, 0, 1 << 30),
        ({"CUDA_DEVICE_MEMORY_LIMIT_0": "much"}, 0, None),
        ({"GPU_PORTION": "0.5"}, 1, 4 << 30),
        ({"GPU_PORTION": "0.5", "CUDA_DEVICE_MEMORY_LIMIT": "4063m"}, 0, 4063 << 20),
        ({"GPU_PORTION": "1"}, 0, None),
        ({"GPU_PORTION": "half"}, 0, None),
    ],
)
def test_the_limits_that_hami_and_kai_set(environ: dict[str, str], index: int, limit: int | None) -> None:
    assert environment_limit(environ, index, lambda index: 8 << 30) == limit


@pytest.mark.parametrize(
    ("environ", "actions", "allowed"),
    [
        ({}, None, set(COMMAND_ACTIONS)),
        ({"GPUMEM_ACTIONS": "clear, reset_peak"}, None, {"empty_cache", "reset_peak"}),
        ({"GPUMEM_ACTIONS": ""}, None, set()),
        ({"GPUMEM_ACTIONS": "none"}, ["clear"], set()),
        ({}, ["reset-peak"], {"reset_peak"}),
        ({}, "sleep,wake", {"release_memory", "resume_memory"}),
        ({"GPUMEM_ACTIONS": "clear,profile"}, ["profile", "snapshot"], {"profile"}),
        ({"GPUMEM_ACTIONS": "clear,profile", "GPUMEM_PROFILE": "0"}, None, {"empty_cache"}),
        ({"GPUMEM_PROFILE": "off"}, None, set(COMMAND_ACTIONS) - {"profile"}),
        ({"GPUMEM_PROFILE": "1"}, None, set(COMMAND_ACTIONS)),
        ({"GPUMEM_PROFILE": ""}, None, set(COMMAND_ACTIONS)),
    ],
)
def test_argument_and_environment_narrow_what_exporters_may_request(
    environ: dict[str, str], actions: Any, allowed: set[str]
) -> None:
    settings = ReporterSettings.resolve(actions=actions, environ=environ)
    assert set(COMMAND_ACTIONS) - set(settings.denied_actions) == allowed
    assert settings.ignored == ()


def test_an_unknown_name_allows_nothing_and_is_logged() -> None:
    settings = ReporterSettings.resolve(actions="all", environ={"GPUMEM_ACTIONS": "cler,terminate"})
    assert set(settings.denied_actions) == set(COMMAND_ACTIONS)
    assert [name for text in settings.ignored for name in ("all", "cler", "terminate") if f"{name!r}" in text] == [
        *("all", "cler", "terminate")
    ]


def test_without_profiles_out_of_memory_errors_have_none_either() -> None:
    settings = ReporterSettings.resolve(environ={"GPUMEM_PROFILE": "0", "GPUMEM_OOM_PROFILE": "1"})
    assert (settings.oom_profile, len(settings.ignored)) == (False, 1)
