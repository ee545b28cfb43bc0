from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from gpumem_client.wire.errors import ConfigurationError
from gpumem_exporter.actions.action_options import ACTIONS, DEFAULT_ACTIONS
from gpumem_exporter.core.yaml_file import MAX_FILE_BYTES
from gpumem_exporter.features.policy.policy_rules import FIELDS, MAX_RULES, Rule, StopAfter, read_policy, read_quantity
from tests.support.paths import REPOSITORY

EXAMPLE = REPOSITORY / "deploy" / "policy.example.yml"
MINIMAL = """\
rules:
  - name: r
    workloads: [a]
    when: {slack_bytes: {over: 1}}
    do: {action: empty_cache}
"""


def read(tmp_path: Path, text: str, allowed: tuple[str, ...] = DEFAULT_ACTIONS) -> tuple[Rule, ...]:
    path = tmp_path / "policy.yml"
    path.write_text(text)
    return read_policy(str(path), allowed=allowed)


def test_a_rule_with_every_key_is_read(tmp_path: Path) -> None:
    (rule,) = read(
        tmp_path,
        """\
rules:
  - name: full.rule-1
    workloads: [notebook-*, eval]
    when:
      device_free_ratio: {under: 5%}
      idle_seconds: {over: 1.5m, under: 2h}
    for: 90s
    do: {action: empty_cache, mode: idle, collect_garbage: true, deadline: 2m}
    cooldown: 1h
    max_per_hour: 6
    stop_after: {clears: 2, freed_under: 1GB, still_free_after: 30, resume_after: 2d}
    trigger: alert
    dry_run: false
""",
    )
    assert (rule.name, rule.workloads, rule.dry_run) == ("full.rule-1", ["notebook-*", "eval"], False)
    assert rule.when.model_dump(exclude_unset=True) == {
        "device_free_ratio": {"under": 0.05},
        "idle_seconds": {"over": 90.0, "under": 7200.0},
    }
    assert (rule.for_seconds, rule.cooldown, rule.max_per_hour) == (90.0, 3600.0, 6)
    stop = {"clears": "2", "freed_under": "1GB", "still_free_after": "30", "resume_after": "48h"}
    assert (rule.trigger, rule.stop_after) == ("alert", StopAfter.model_validate(stop))
    request = rule.request
    assert (request.action, request.mode, request.collect_garbage) == ("empty_cache", "idle", True)
    assert request.deadline_seconds == 120.0


def test_a_minimal_rule_is_a_dry_run_with_default_limits(tmp_path: Path) -> None:
    (rule,) = read(tmp_path, MINIMAL)
    assert rule.dry_run is rule.request.dry_run is True
    assert rule.request.mode == "auto"
    assert (rule.for_seconds, rule.cooldown, rule.max_per_hour) == (0.0, 300.0, 12)
    assert (rule.trigger, rule.stop_after) == ("conditions", StopAfter())
    assert rule.request.settle_seconds == 10.0


def test_a_cooldown_may_be_as_short_as_the_settling_time(tmp_path: Path) -> None:
    (equal,) = read(tmp_path, MINIMAL + "    cooldown: 2s\n    stop_after: {still_free_after: 2s}\n")
    (never,) = read(tmp_path, MINIMAL + "    cooldown: 2s\n    stop_after: never\n")
    (snapshot,) = read(tmp_path, MINIMAL.replace("empty_cache", "snapshot"))
    assert [rule.request.settle_seconds for rule in (equal, never)] == [2.0, 0.0]
    assert never.stop_after is snapshot.stop is None


def test_the_documented_rules_are_dry_runs_and_clear_only_what_stays_free(tmp_path: Path) -> None:
    example, document = EXAMPLE.read_text(), (REPOSITORY / "docs" / "policies-and-alerts.md").read_text()
    for text in (example, document.partition("```yaml\n")[2].partition("```")[0]):
        for rule in read(tmp_path, text):
            assert rule.dry_run
            assert rule.request.action != "empty_cache" or "idle_cache_bytes" in rule.bounds
    assert [name for name in FIELDS if name not in example] == []
    keys = {field.alias or name for section in (Rule, StopAfter) for name, field in section.model_fields.items()}
    assert [key for key in keys if f"{key}:" not in example] == []


def test_a_rule_lets_only_idle_engines_sleep(tmp_path: Path) -> None:
    text = MINIMAL.replace("empty_cache", "release_memory, keep: weights, wait_idle: 10s")
    with pytest.raises(ConfigurationError, match="engine_idle_seconds over at least 2 min"):
        read(tmp_path, text, ACTIONS)
    when = "when: {engine_idle_seconds: {over: 30m}}"
    (rule,) = read(tmp_path, re.sub("when: .*", when, text), ACTIONS)
    request = rule.request
    assert (request.keep, request.wait_idle_seconds, request.settle_seconds) == ("weights", 10.0, 10.0)


@pytest.mark.parametrize(
    ("spoil", "line", "named"),
    [
        (lambda text: text + "    cooldwon: 5m\n", 6, ("'cooldwon'", "name, workloads, when")),
        (lambda text: text + "    cooldown: 0\n", 6, ("cooldown: '0'", "equal to 1")),
        (lambda text: text + "    cooldown: 2s\n", 6, ("cooldown", "still_free_after", "10 s")),
        (lambda text: text.replace("empty_cache", "snapshot") + "    stop_after: never\n", 6, ("collect_garbage",)),
        (lambda text: text + "    trigger: alerts\n", 6, ("trigger: 'alerts'", "'conditions' or 'alert'")),
        (lambda text: text + "    cooldown: soon\n", 6, ("cooldown: 'soon'", "60s, 5m or 1h")),
        (lambda text: text + "    dry_run: yes\n", 6, ("dry_run: 'yes'", "true", "false")),
        (lambda text: text.replace("{over: 1}", "{above: 1}"), 4, ("'above'", "over, under")),
        (lambda text: text.replace("{over: 1}", "{over: [1]}"), 4, ("slack_bytes", "4GiB")),
        (lambda text: text.replace("{over: 1}", "{over: 2GiB, under: 1GiB}"), 4, ("slack_bytes", "over", "under")),
        (lambda text: text.replace("slack_bytes: {over: 1}", ""), 4, ("when:", "slack_bytes")),
        (lambda text: text.replace("[a]", "[]"), 3, ("workloads:", "at least 1")),
        (lambda text: text.replace("workloads: [a]", "for: 1"), 2, ("'workloads'",)),
        (lambda text: text.replace("name: r", "name: 'a rule'"), 2, ("name: 'a rule'", "A-Za-z0-9")),
        (lambda text: text.replace("empty_cache", "clear"), 5, ("action: 'clear'", ", ".join(ACTIONS))),
        (lambda text: text.replace("empty_cache", "terminate"), 5, ("terminate", "--action.allow", "empty_cache")),
        (lambda text: text.replace("empty_cache", "empty_cache, deadline: 2h"), 5, ("deadline: 7200.0", "3600")),
        (lambda text: text + text.partition("\n")[2], 6, ("'r'",)),
        (lambda text: text.replace("rules:", "rules: x #"), 2, ("YAML",)),
        (lambda text: "- 1\n", 1, ("keys", "rules")),
        (lambda text: "? [a]\n: 1\n", 1, ("key", "text")),
        (lambda text: text.replace("name: r", "name: !!python/object/apply:os.system [id]"), 2, ("name", "tag")),
        (lambda text: "rules:\n" + "  - {}\n" * (MAX_RULES + 1), 1, ("100",)),
    ],
)
def test_an_error_has_the_line_the_value_and_what_is_accepted(
    tmp_path: Path, spoil: object, line: int, named: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        read(tmp_path, spoil(MINIMAL))  # type: ignore[operator]
    message = str(refused.value)
    assert message.startswith(f"{tmp_path / 'policy.yml'}:{line}: "), message
    assert [part for part in (*named, "\n") if part not in message] == ["\n"], message


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"# nothing\n",
        b"\xff\xfe\x00",
        b"a: " + b"[" * 1000,
        b"\x00",
        b"rules: &all [*all]\n",
        b"#" * (MAX_FILE_BYTES + 1),
    ],
)
def test_an_empty_or_unreadable_file_is_an_error_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "policy.yml"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"^[^\n]+$"):
        read_policy(str(path), allowed=DEFAULT_ACTIONS)
    with pytest.raises(ConfigurationError, match=rf"no\.yml'.*{os.strerror(errno.ENOENT)}"):
        read_policy(str(tmp_path / "no.yml"), allowed=DEFAULT_ACTIONS)


def test_a_rule_concerns_the_workloads_that_match_its_patterns(tmp_path: Path) -> None:
    (rule,) = read(tmp_path, MINIMAL.replace("[a]", "[train, 'eval-*', 'b?']"))
    workloads = ("train", "train-2", "eval-2", "eval", "b1", "")
    assert [workload for workload in workloads if rule.concerns(workload)] == ["train", "eval-2", "b1"]


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("4GiB", "bytes", 4 << 30),
        ("8e9", "bytes", 8e9),
        ("2GB", "bytes", 2e9),
        ("5.25%", "ratio", 0.0525),
        ("5m", "seconds", 300),
        ("1.5h", "seconds", 5400),
        *((text, "bytes", "bytes, such as ") for text in ("", "4 gib", "-1", "1e400")),
        ("1.01", "ratio", "a ratio, such as "),
        ("４", "seconds", "a time, such as "),
    ],
)
def test_a_quantity_is_read_with_its_unit(text: str, unit: str, value: float | str) -> None:
    if isinstance(value, str):
        with pytest.raises(ValueError, match=f"^expected {value}"):
            read_quantity(text, unit)
    else:
        assert read_quantity(text, unit) == pytest.approx(value)
