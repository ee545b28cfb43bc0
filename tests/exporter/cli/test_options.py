from __future__ import annotations

from pathlib import Path

import pytest

from gpumem_client.wire.errors import ConfigurationError
from gpumem_exporter.cli.options import action_token, exporter_urls


def _file(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_the_address_comes_from_the_option_then_the_environment_then_the_defaults() -> None:
    environ = {"GPUMEM_EXPORTER_URL": "http://env:1"}
    assert exporter_urls("http://option:1", environ) == ("http://option:1",)
    assert exporter_urls(None, environ) == ("http://env:1",)
    assert exporter_urls(None, {}) == ("unix:///run/gpumem/exporter.sock", "http://127.0.0.1:9844")


def test_the_token_comes_from_the_option_then_the_variable_then_its_file(tmp_path: Path) -> None:
    option, variable = _file(tmp_path / "o", "of-option\n"), _file(tmp_path / "v", " of-file \n")
    environ = {"GPUMEM_ACTION_TOKEN": "of-variable", "GPUMEM_ACTION_TOKEN_FILE": str(variable)}
    assert action_token(str(option), environ) == "of-option"
    assert action_token(None, environ) == "of-variable"
    assert action_token(None, {"GPUMEM_ACTION_TOKEN_FILE": str(variable)}) == "of-file"
    assert action_token(None, {}) == ""


@pytest.mark.parametrize("content", ["", " \n", "two tokens", "two\nlines", "späß", "nul\0"])
def test_a_file_without_one_token_is_an_error_that_does_not_show_the_content(tmp_path: Path, content: str) -> None:
    with pytest.raises(ConfigurationError, match=str(tmp_path)) as caught:
        action_token(str(_file(tmp_path / "t", content)), {})
    assert not content.strip() or content.strip() not in str(caught.value)


def test_a_token_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(ConfigurationError, match=str(path)):
            action_token(str(path), {})
