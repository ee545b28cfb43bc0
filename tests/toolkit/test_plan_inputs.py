from __future__ import annotations

import io
import json
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpumem_client.wire.errors import ConfigurationError
from gpumem_toolkit.planning import planner
from gpumem_toolkit.planning import planner_process as progress_module
from gpumem_toolkit.planning.command import main
from gpumem_toolkit.planning.configuration import apply, backup_of, diff, parse_map, planned_text
from gpumem_toolkit.planning.devices import Gpu, parse_bytes, parse_gpu
from gpumem_toolkit.planning.job import Description, Job, TensorSpec, parse_tensor, parse_value, read_arguments
from gpumem_toolkit.planning.planner_process import Progress, place, run_in_worker
from tests.support.processes.running_command import run_python
from tests.support.waiting import wait_for


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "shown"), [(Terminal(), True), (io.StringIO(), False)])
def test_the_progress_is_one_line_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, shown: bool
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress() as progress:
        run = progress.of("checkpointing")
        run(4)
        run(315)
    text = stream.getvalue()
    assert ("run 2: checkpointing, batch 315" in text) is shown
    assert "\n" not in text
    assert text.endswith("\r\033[K") is shown


def test_a_log_has_a_line_about_a_plan_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, now = io.StringIO(), [0.0]
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with Progress() as progress:
        progress.of("checkpointing")(315)
        now[0] = 45.0
        wait_for(stream.getvalue, "the line")
    assert stream.getvalue() == "planning for 45 s: run 1: checkpointing, batch 315\n"


GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "dtype", "name", "shape"),
    [
        ("float32[B,3,224,224]", "float32", "", (16, 3, 224, 224)),
        (" bf16 [ B , 7 ] ", "bfloat16", "", (16, 7)),
        ("int64[B*512]", "int64", "", (16 * 512,)),
        ("mask=bool[512,2*B*3]", "bool", "mask", (512, 96)),
        ("float[]", "float32", "", ()),
    ],
)
def test_a_tensor_has_a_dtype_and_dimensions_that_may_contain_the_batch_size(
    text: str, dtype: str, name: str, shape: tuple[int, ...]
) -> None:
    spec = parse_tensor(text)
    assert (spec.dtype, spec.name, spec.at(16)) == (dtype, name, shape)


@pytest.mark.parametrize(
    ("text", "size"), [("80GiB", 80 * GIB), ("24GB", 24 * 10**9), ("1.5 MiB", 3 << 19), ("512", 512), ("2tib", 2 << 40)]
)
def test_a_size_has_binary_or_decimal_units(text: str, size: int) -> None:
    assert parse_bytes(text) == size


def test_a_gpu_is_a_size_or_a_name_and_has_overhead() -> None:
    assert parse_gpu("H100 80GB") == parse_gpu("h100-80gb")
    assert parse_gpu("80GiB") == Gpu("80GiB", 80 * GIB)
    assert Gpu("80GiB", 80 * GIB, 2 * GIB).free_bytes == 78 * GIB
    assert Gpu("1GiB", GIB, 2 * GIB).free_bytes == 0


INVALID: tuple[tuple[Callable[..., object], Any, str], ...] = (
    (parse_tensor, "float32", "float32[B,3,224,224]"),
    (parse_tensor, "float31[B]", "bfloat16"),
    (parse_tensor, "float32[B,x]", "'x'"),
    (parse_tensor, "float32[B,0]", "'0'"),
    (parse_tensor, "float32[B*B]", "more than once"),
    (parse_tensor, "float32[B,,3]", "''"),
    *((parse_bytes, text, repr(text)) for text in ("", "GiB", "-1GiB", "1e9", "80 gigs", "3i")),
    (parse_gpu, "h1000", "h100-80gb"),
    *(
        (lambda given: Job(object, (TensorSpec("float32", ()),), **given), {field: value}, value)
        for field, value in (
            *(("precision", "fp8"), ("optimizer", "lion"), ("loss", "l3"), ("attention", "paged")),
            ("convolution", "winograd"),
        )
    ),
    *(
        (lambda seconds: run_in_worker(print, timeout_seconds=seconds), seconds, f"{seconds:g}")
        for seconds in (0.0, -1.0, float("nan"), float("inf"), 1e9)
    ),
    (lambda size: Description(*size).job(), (2, 200, 16), "hidden 200"),
    (lambda size: Description(*size).job(), (0, 64, 16), "layers 0"),
    (lambda parameters: Description(32, 4096, 2048, parameters=parameters).job(), 10**9, "1000000000"),
)
"""Functions with an invalid input, and what the error names: the value, or what is accepted."""


@pytest.mark.parametrize(("function", "given", "named"), INVALID)
def test_an_invalid_input_is_rejected(function: Callable[..., object], given: Any, named: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(named)):
        function(given)


def test_the_place_of_an_error_is_the_last_line_of_the_job_s_own_code() -> None:
    library = sysconfig.get_path("stdlib")
    files = {
        "/home/train.py": 1,
        f"{library}/site-packages/timm/hiera.py": 2,
        f"{library}/json/decoder.py": 3,
        planner.__file__: 4,
        "<string>": 5,
    }
    frames = [traceback.FrameSummary(file, line, "f") for file, line in files.items()]
    assert place(frames) == f"{library}/site-packages/timm/hiera.py:2"
    assert place(frames[3:]) == "<string>:5"


def test_training_arguments_are_a_dictionary_a_file_or_the_arguments_of_a_script(tmp_path: Path) -> None:
    expected = {"bf16": True, "per_device_train_batch_size": 4, "optim": "adafactor", "fp16": False}
    script = ["--bf16", "--per-device-train-batch-size", "4", "--optim=adafactor", "--fp16", "False"]
    file = tmp_path / "arguments.json"
    file.write_text(json.dumps(expected))
    for given in (expected, script, str(file)):
        assert read_arguments(given) == expected
    file.write_text("[]")
    for path in (file, tmp_path / "none.json"):
        with pytest.raises(ConfigurationError, match=re.escape(str(path))):
            read_arguments(path)


@pytest.mark.parametrize(
    ("text", "value"),
    [("0.9", 0.9), ("8", 8), ("False", False), ("none", None), ("adamw", "adamw"), ("(0.9,1)", (0.9, 1))],
)
def test_the_value_of_an_option_is_a_literal_or_a_word(text: str, value: object) -> None:
    assert parse_value(text) == value


def test_importing_the_package_imports_no_torch_and_its_names_are_sorted() -> None:
    code = (
        "import sys\n"
        "import gpumem_toolkit as toolkit\n"
        "assert list(toolkit.__all__) == sorted(toolkit.__all__) and set(toolkit.__all__) <= set(dir(toolkit))\n"
        "assert 'torch' not in sys.modules and 'gpumem_toolkit.planning' not in sys.modules\n"
        "assert toolkit.Plan.__name__ == 'Plan'\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr


# The configuration files that a plan changes


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
