from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gpumem_toolkit.planning.command import main

JOB = ("nowhere:make", "--input", "float32[B,8]", "--gpu", "1GiB")


def error_of(capsys: pytest.CaptureFixture[str], path: Path, assignment: str) -> str:
    """Return the error of a plan that would fail later, because there is no such model."""
    assert main([*JOB, "--apply", str(path), "--map", assignment]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(("name", "package"), [("config.yaml", "ruamel.yaml"), ("config.toml", "tomlkit")])
def test_without_its_package_apply_fails_before_it_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, package: str
) -> None:
    (tmp_path / name).write_text("")
    monkeypatch.setitem(sys.modules, package, None)
    assert f"pip install {package}" in error_of(capsys, tmp_path / name, "batch=batch")


def test_files_keys_and_values_are_checked_before_it_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.toml"
    assert str(path) in error_of(capsys, path, "batch=batch")
    path.write_text("batch = 8\n")
    assert "train" in error_of(capsys, path, "train.batch=batch")
    assert "accumulation" in error_of(capsys, path, "batch=size")
    assert path.read_text() == "batch = 8\n"
