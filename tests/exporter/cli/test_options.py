from __future__ import annotations

from pathlib import Path

import pytest

from gpumem_client.wire.errors import ConfigurationError
from gpumem_exporter.cli.options import ConnectionOptions


def _file(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_the_address_comes_from_the_option_then_the_environment_then_the_defaults() -> None:
    environ = {"GPUMEM_EXPORTER_URL": "http://env:1"}
    assert ConnectionOptions(url="http://option:1").urls(environ) == ("http://option:1",)
    assert ConnectionOptions().urls(environ) == ("http://env:1",)
    assert ConnectionOptions().urls({}) == ("unix:///run/gpumem/exporter.sock", "http://127.0.0.1:9844")


def test_the_token_comes_from_the_option_then_the_variable_then_its_file(tmp_path: Path) -> None:
    option, variable = _file(tmp_path / "o", "of-option\n"), _file(tmp_path / "v", " of-file \n")
    environ = {"GPUMEM_ACTION_TOKEN": "of-variable", "GPUMEM_ACTION_TOKEN_FILE": str(variable)}
    assert ConnectionOptions(token_file=option).token(environ) == "of-option"
    assert ConnectionOptions().token(environ) == "of-variable"
    assert ConnectionOptions().token({"GPUMEM_ACTION_TOKEN_FILE": str(variable)}) == "of-file"
    assert ConnectionOptions().token({}) == ""


@pytest.mark.parametrize("content", ["", " \n", "two tokens", "two\nlines", "späß", "nul\0"])
def test_a_file_without_one_token_is_an_error_that_does_not_show_the_content(tmp_path: Path, content: str) -> None:
    with pytest.raises(ConfigurationError, match=str(tmp_path)) as caught:
        ConnectionOptions(token_file=_file(tmp_path / "t", content)).token({})
    assert not content.strip() or content.strip() not in str(caught.value)


def test_a_token_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(ConfigurationError, match=str(path)):
            ConnectionOptions(token_file=path).token({})
