from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gpumem_client.wire.errors import ConfigurationError
from gpumem_toolkit.planning.command import main
from gpumem_toolkit.planning.configuration import apply, backup_of, diff, parse_map, planned_text

YAML = """\
# how we train
train:   {lr: 1e-4}      # kept
loader:
    batch_size:   8      # per device
    "workers": 4
stages:
- {name: warm, batch: 16}
- name: main
  batch: '32'   # quoted
empty:
"""
TOML = """\
# how we train
[train]
batch_size   = 8      # per device
lr = 1e-4

[[stage]]
batch = 16
[train.more]
inline = {accumulation = 1, x = 2}
"""


def change(path: Path, text: str, values: dict[str, int]) -> str:
    path.write_bytes(text.encode())
    before, after = planned_text(path, values)
    assert before == text
    return after


def test_only_the_values_of_a_yaml_file_change(tmp_path: Path) -> None:
    after = change(tmp_path / "a.yaml", YAML, {"loader.batch_size": 48, "stages.0.batch": 2, "stages.1.batch": 64})
    expected = YAML.replace("  8   ", "  48   ").replace("batch: 16", "batch: 2").replace("'32'", "64")
    assert after == expected


def test_a_yaml_key_without_a_value_receives_one(tmp_path: Path) -> None:
    assert change(tmp_path / "a.yml", YAML, {"empty": 5}) == YAML.replace("empty:", "empty: 5")


def test_only_the_values_of_a_toml_file_change(tmp_path: Path) -> None:
    values = {"train.batch_size": 48, "stage.0.batch": 2, "train.more.inline.accumulation": 7}
    expected = (
        TOML.replace("= 8 ", "= 48 ").replace("batch = 16", "batch = 2").replace("accumulation = 1", "accumulation = 7")
    )
    assert change(tmp_path / "a.toml", TOML, values) == expected


@pytest.mark.parametrize("name", ["a.yaml", "a.toml"])
def test_line_ends_stay_as_they_are(tmp_path: Path, name: str) -> None:
    text = "a: 1\r\nb: 2\r\n" if name.endswith("yaml") else "a = 1\r\nb = 2\r\n"
    assert change(tmp_path / name, text, {"b": 30}) == text.replace("2", "30")


@pytest.mark.parametrize(
    ("name", "text", "key", "expected"),
    [
        ("a.yaml", YAML, "loader.batch", "'loader.batch'"),
        ("a.yaml", YAML, "stages.7.batch", "'stages.7.batch'"),
        ("a.yaml", YAML, "loader", "'loader'"),
        ("a.yaml", "a: [1", "a", "YAML"),
        ("a.yaml", "a: |\n  8\nb: 1\n", "a", "'a'"),
        ("a.yaml", "a: &n 8\nb: *n\n", "a", "'a' has the anchor &n"),
        ("a.yaml", "a: &n 8\nb: *n\n", "b", "'b' has the anchor &n"),
        ("a.yaml", "", "a", "'a'"),
        ("a.toml", TOML, "train.batch", "'train.batch'"),
        ("a.toml", TOML, "train.lr.x", "'train.lr.x'"),
        ("a.toml", TOML, "train", "'train'"),
        ("a.toml", "a = = 1", "a", "TOML"),
        ("a.json", "{}", "a", ".yaml, .yml and .toml"),
    ],
)
def test_errors_are_one_line(tmp_path: Path, name: str, text: str, key: str, expected: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        change(tmp_path / name, text, {key: 1})
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_change_is_shown_and_written(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(YAML)
    path.chmod(0o640)
    for size in (48, 50):
        before, after = planned_text(path, {"loader.batch_size": size})
        apply(path, before, after)
    changed = [line for line in diff(path, YAML, YAML.replace("  8 ", "  48 ")).splitlines() if "batch_size" in line]
    assert changed == ["-    batch_size:   8      # per device", "+    batch_size:   48      # per device"]
    assert "batch_size:   50 " in path.read_text()
    assert backup_of(path).read_text() == YAML, "the first state is kept, not the one before the last"
    assert {p.name for p in tmp_path.iterdir()} == {"a.yaml", "a.yaml.backup"}
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real.toml").write_text(TOML)
    link = tmp_path / "link.toml"
    link.symlink_to("real.toml")
    apply(link, *planned_text(link, {"train.batch_size": 9}))
    assert link.is_symlink()
    assert "= 9 " in (tmp_path / "real.toml").read_text()
    assert backup_of(link).read_text() == TOML


def test_a_map_assigns_planned_values_to_keys() -> None:
    values = {"batch": 48, "accumulation": 2}
    assert parse_map(["train.b = batch", "a=accumulation"], values) == {"train.b": 48, "a": 2}
    for text, expected in (("train.b", "KEY=VALUE"), ("=batch", "KEY=VALUE"), ("b=size", "batch, accumulation")):
        with pytest.raises(ConfigurationError, match=expected):
            parse_map([text], values)


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
