from __future__ import annotations

import io
import json
import re
import sys
import sysconfig
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpumem_client.wire.errors import ConfigurationError
from gpumem_toolkit.planning import planner
from gpumem_toolkit.planning import planner_process as progress_module
from gpumem_toolkit.planning.devices import Gpu, parse_bytes, parse_gpu
from gpumem_toolkit.planning.job import Description, Job, TensorSpec, parse_tensor, parse_value, read_arguments
from gpumem_toolkit.planning.planner_process import Progress, place, run_in_worker
from tests.support.running_command import run_python
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
    ("text", "expected"),
    [
        ("float32", "float32[B,3,224,224]"),
        ("float31[B]", "bfloat16"),
        ("float32[B,x]", "'x'"),
        ("float32[B,0]", "'0'"),
        ("float32[B*B]", "more than once"),
        ("float32[B,,3]", "''"),
    ],
)
def test_an_invalid_tensor_is_rejected(text: str, expected: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_tensor(text)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("text", "size"), [("80GiB", 80 * GIB), ("24GB", 24 * 10**9), ("1.5 MiB", 3 << 19), ("512", 512), ("2tib", 2 << 40)]
)
def test_a_size_has_binary_or_decimal_units(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1e9", "80 gigs", "3i"])
def test_an_invalid_size_is_rejected(text: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(repr(text))):
        parse_bytes(text)


def test_a_gpu_is_a_size_or_a_name_and_has_overhead() -> None:
    assert parse_gpu("H100 80GB") == parse_gpu("h100-80gb")
    assert parse_gpu("80GiB") == Gpu("80GiB", 80 * GIB)
    assert Gpu("80GiB", 80 * GIB, 2 * GIB).free_bytes == 78 * GIB
    assert Gpu("1GiB", GIB, 2 * GIB).free_bytes == 0
    with pytest.raises(ConfigurationError, match="h100-80gb"):
        parse_gpu("h1000")


@pytest.mark.parametrize(
    ("field", "value"),
    [("precision", "fp8"), ("optimizer", "lion"), ("loss", "l3"), ("attention", "paged"), ("convolution", "winograd")],
)
def test_a_job_with_an_unknown_option_is_rejected(field: str, value: str) -> None:
    with pytest.raises(ConfigurationError, match=value):
        Job(object, (TensorSpec("float32", ()),), **{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_an_invalid_time_limit_is_rejected(seconds: float) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(f"{seconds:g}")):
        run_in_worker(print, timeout_seconds=seconds)


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


def test_an_inconsistent_description_is_rejected() -> None:
    with pytest.raises(ConfigurationError, match=r"1000000000\b.*\b32\b.*4096\b.*32000"):
        Description(32, 4096, 2048, parameters=10**9).job()
    with pytest.raises(ConfigurationError, match="hidden 200"):
        Description(2, 200, 16).job()
    with pytest.raises(ConfigurationError, match="layers 0"):
        Description(0, 64, 16).job()


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
