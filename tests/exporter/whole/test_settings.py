from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpumem_client.wire.errors import ConfigurationError
from gpumem_exporter.actions.action_options import ACTIONS, DEFAULT_ACTIONS, OUTSIDE_ACTIONS
from gpumem_exporter.serve_command import load_settings


def refused(flags: dict[str, Any] | None = None, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load_settings(flags or {}, environ or {})
    text = str(caught.value)
    assert "\n" not in text
    return text


def written(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("text", ["web.config.file: {}", "web: {{config: {{file: {}}}}}"])
def test_the_key_of_the_web_configuration_is_web_config_file(tmp_path: Path, text: str) -> None:
    web = str(tmp_path / "web.yml")
    file = written(tmp_path / "c.yaml", text.format(web))
    assert load_settings({"config.file": file}, {}).web_config_file == web
    assert load_settings({"web.config.file": web}, {}) == load_settings({}, {"GPUMEM_WEB_CONFIG_FILE": web})


def test_flags_environment_file_and_defaults_have_this_precedence(tmp_path: Path) -> None:
    file = written(
        tmp_path / "c.yaml", "collect.interval: 2\nreport.interval: 3\nreport.expiry: 60\nlog.level: warning\n"
    )
    settings = load_settings(
        {"config.file": file, "collect.interval": "5", "log.format": None},
        {"GPUMEM_COLLECT_INTERVAL": "4", "GPUMEM_REPORT_INTERVAL": "4"},
    )
    assert settings.collect_interval == 5
    assert settings.report_interval == 4
    assert settings.report_expiry == 60
    assert settings.log_level == "warning"
    assert settings.log_format == "logfmt"


def test_keys_are_dotted_or_nested_and_values_repeated_or_separated_by_commas(tmp_path: Path) -> None:
    dotted = written(tmp_path / "a.yaml", "web.listen-address: [':1', '[::1]:2']\nreport.max-processes: 9\n")
    nested = written(tmp_path / "b.yaml", "web:\n  listen-address: [':1', '[::1]:2']\nreport:\n  max-processes: 9\n")
    assert load_settings({"config.file": dotted}, {}) == load_settings({"config.file": nested}, {})
    assert load_settings({}, {"GPUMEM_CONFIG_FILE": nested}).web_listen_address == (":1", "[::1]:2")
    by_flag = load_settings({"web.listen-address": [":1", "127.0.0.1:2"]}, {})
    by_environment = load_settings({}, {"GPUMEM_WEB_LISTEN_ADDRESS": ":1, 127.0.0.1:2"})
    assert by_flag.web_listen_address == by_environment.web_listen_address == (":1", "127.0.0.1:2")


@pytest.mark.parametrize(
    ("given", "allowed"),
    [
        (",".join(["default", *OUTSIDE_ACTIONS]), {*ACTIONS}),
        (["terminate", "default"], {"terminate", *DEFAULT_ACTIONS}),
        ("sleep,wake", {"release_memory", "resume_memory"}),
        ("none", set()),
    ],
)
def test_action_allow_adds_to_the_default_actions_or_is_none(given: Any, allowed: set[str]) -> None:
    assert set(load_settings({"action.allow": given}, {}).action_allow) == allowed


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"collect.interval": "soon"}, ("--collect.interval", "'soon'", "number")),
        ({"collect.interval": "nan"}, ("--collect.interval", "'nan'", "3600")),
        ({"report.max-processes": "1.5"}, ("--report.max-processes", "'1.5'", "integer")),
        ({"web.listen-address": ":70000"}, ("--web.listen-address", "':70000'", "HOST:PORT")),
        ({"web.listen-address": "::1:9844"}, ("--web.listen-address", "[IPV6]:PORT")),
        ({"web.listen-address": ","}, ("--web.listen-address", "address")),
        ({"web.listen-address": ":1,:1"}, ("--web.listen-address", "repeated")),
        ({"web.listen-address": 9844}, ("--web.listen-address", "9844", "string")),
        ({"web.listen-socket": "run/x.sock"}, ("--web.listen-socket", "absolute")),
        ({"web.listen-socket": "/" + "x" * 107}, ("--web.listen-socket", "107 bytes")),
        ({"web.telemetry-path": "/health"}, ("--web.telemetry-path", "'/health'")),
        ({"web.telemetry-path": "/{x}"}, ("--web.telemetry-path", "/metrics")),
        ({"log.level": "loud"}, ("--log.level", "'loud'", "'warning'")),
        ({"report.expiry": "1.5"}, ("--report.expiry", "1.5", "report.interval (1)")),
    ],
)
def test_an_invalid_flag_is_an_error_with_its_value_and_the_accepted_ones(
    flags: dict[str, Any], named: tuple[str, ...]
) -> None:
    text = refused(flags)
    assert [part for part in named if part not in text] == [], text


def test_an_error_names_the_source_of_the_value(tmp_path: Path) -> None:
    assert refused({}, {"GPUMEM_COLLECT_INTERVAL": "x"}).startswith("GPUMEM_COLLECT_INTERVAL: 'x'")
    file = written(tmp_path / "c.yaml", "collect:\n  interval: [1]\n")
    assert refused({"config.file": file}).startswith(f"{file}:2: collect.interval: ['1']")
    assert str(tmp_path / "no.yaml") in refused({"config.file": str(tmp_path / "no.yaml")})


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("config.file: x", ("'config.file'",)),
        ("collect.interval: 1\ncollect:\n  interval: 1", (":3: ", "'collect.interval'", ":1: ")),
        ("collect.interval:", (": collect.interval:",)),
        ("- 1", ("keys",)),
        ("a: [", ("YAML",)),
        ("log.level: !!python/object/apply:os.system [true]", (":1: log.level:", "YAML")),
        ("log: {level: {a: 1}}", (":1: ", "'log.level.a'", "mean log.level?")),
        ("\x00", ("YAML",)),
    ],
)
def test_an_error_in_the_configuration_file_names_the_file(tmp_path: Path, text: str, named: tuple[str, ...]) -> None:
    file = written(tmp_path / "c.yaml", text)
    message = refused({"config.file": file})
    assert message.startswith(file)
    assert [part for part in named if part not in message] == [], message
