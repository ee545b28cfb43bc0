"""What a user reads after a mistake: the whole answers of the commands and of the HTTP API, in one golden file.

Each answer names what is wrong, the value, and a next step. Read the file as a user at three in the morning.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from gpumem_client.wire.protocol import PROFILES_PATH, REPORTS_PATH
from gpumem_exporter.core.readings import ProcessMemory
from gpumem_exporter.edge.problems import ProblemCode
from gpumem_exporter.main import main
from tests.support.builders.builders import UUIDS, report, sample
from tests.support.servers.running_exporter import ACTIONS, RunningExporter, problem, running_exporter
from tests.support.truth.golden import assert_golden
from tests.support.waiting import eventually

JSON = "application/json"
UNKNOWN_ID = "0" * 32
COMMANDS = """
claer --gpu 0
info --jsn
info --sort size
clear
clear --gpu 7
clear --workload llm-pretran
clear --user adda
clear --pid many
clear --all --mode idel
clear --all --url localhost
clear --all --url 127.0.0.1:1
clear --all --token-file FOLDER/missing
clear --all --token-file FOLDER/another --url http://127.0.0.1:TOKENS
fraction 1.5 --all
sleep --all
terminate --pid 1
profile 4242
profile --workload llm-pretrain --duration 5x
profile show 3f2a
report --job llm-pretran
actions cancle 1
actions show 3f2a
events --type ooms
events --since yesterday
fleet info
run
serve --web.listen-address 127.0.0.1:PORT
serve --web.listen-adress :9844
serve --action.allow claer
serve --collect.interval 0
serve --web.listen-address 127.0.0.1:0 --policy.file FOLDER/policy.yml
serve --web.listen-address 127.0.0.1:0 --client.directory /nonexistent/client
serve --config.file FOLDER/config.yml
"""
POLICY = """\
rules:
  - name: full
    workloads: ["*"]
    when: {slack_bytes: {over: 1GiB}}
    do: {action: empty_cache}
    cooldwon: 5m
"""
CLEAR = {"action": "empty_cache", "target": {"all": True}}


@dataclass(frozen=True)
class Sent:
    """A wrong request."""

    method: str
    path: str
    body: str = ""
    media_type: str = JSON


REQUESTS = (
    Sent("POST", ACTIONS, json.dumps({**CLEAR, "action": "emtpy_cache"})),
    Sent("POST", ACTIONS, json.dumps({**CLEAR, "action": "clear"})),
    Sent("POST", ACTIONS, json.dumps({**CLEAR, "dryrun": True})),
    Sent("POST", ACTIONS, json.dumps({**CLEAR, "target": {"worklod": "llm-pretrain"}})),
    Sent("POST", ACTIONS, json.dumps({**CLEAR, "target": {"uuid": UUIDS[0][:-1]}})),
    Sent("POST", ACTIONS, json.dumps({**CLEAR, "wait_seconds": 90})),
    Sent("POST", ACTIONS, json.dumps({"action": "empty_cache"})),
    Sent("POST", ACTIONS, json.dumps({"action": "empty_cache", "target": {}})),
    Sent("POST", ACTIONS, json.dumps(CLEAR).replace(",", "")),
    Sent("POST", ACTIONS, json.dumps(CLEAR), "application/x-www-form-urlencoded"),
    Sent("POST", ACTIONS, json.dumps({**CLEAR, "reason": "x" * (64 << 10)})),
    Sent("PUT", ACTIONS),
    Sent("GET", f"{ACTIONS}/{UNKNOWN_ID}"),
    Sent("GET", f"{ACTIONS}?limt=5"),
    Sent("GET", "/api/v1/action"),
    Sent("GET", "/api/v1/events?type=ooms"),
    Sent("GET", "/api/v1/events/999"),
    Sent("GET", "/api/v1/jobs/llm-pretran"),
    Sent("GET", f"{PROFILES_PATH}/{UNKNOWN_ID}"),
    Sent("GET", f"{PROFILES_PATH}/latest"),
    Sent("GET", "/api/v1/history?from=2000&to=1000"),
    Sent("GET", "/metrics?collect[]=device"),
    Sent("POST", REPORTS_PATH, "{}"),
    Sent("POST", "/-/reload"),
)


@contextlib.contextmanager
def node() -> Iterator[RunningExporter]:
    """Run an exporter on a node with two processes that report, and one that does not."""
    with running_exporter(report_interval=300, report_expiry=900) as exporter:
        exporter.provider.processes[UUIDS[0]] = (ProcessMemory(1, 100), ProcessMemory(4242, 100))
        for pid, workload in ((1, "llm-pretrain"), (2, "notebook")):
            sent = report(pid, devices=(sample(UUIDS[pid - 1], 10, 7),), workload=workload, rank="0")
            assert exporter.report(sent).status == 200
        eventually(lambda: 4242 in {row["pid"] for row in exporter.document("/api/v1/processes")["processes"]})
        yield exporter


def test_each_answer_to_a_mistake_is_the_one_of_the_golden_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in os.environ if name.startswith("GPUMEM_") and name != "GPUMEM_UPDATE_GOLDEN"]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("gpumem_exporter.serving.configure_logging", lambda *_: None)  # the log of this process
    files = {"token": "right", "another": "wrong", "policy.yml": POLICY, "config.yml": "web.listen-adress: :9844"}
    for name, text in files.items():
        (tmp_path / name).touch(0o600)
        (tmp_path / name).write_text(text)
    with node() as exporter, running_exporter(action_token_file=str(tmp_path / "token")) as with_token:
        replaced = {"FOLDER": str(tmp_path), "PORT": str(exporter.port), "TOKENS": str(with_token.port)}
        monkeypatch.setenv("GPUMEM_EXPORTER_URL", exporter.url)
        answers = [
            *(_command(line, replaced, capsys) for line in COMMANDS.strip().splitlines()),
            *(_request(sent, exporter) for sent in REQUESTS),
            _request(Sent("POST", ACTIONS, json.dumps(CLEAR)), with_token),
        ]
    text = "\n".join(answers)
    for name, value in sorted(replaced.items(), key=lambda each: -len(each[1])):
        text = re.sub(rf"(?<!\d){re.escape(value)}(?!\d)", name, text)
    text = re.sub(r"(?<=known users: )\d+", "UID", re.sub(r"(?<=process of user )\S+(?=;)", "USER", text))
    # Python 3.13 names two statuses as RFC 9110 does.
    for old, new in (("Unprocessable Entity", "Unprocessable Content"), ("Request Entity", "Content")):
        text = text.replace(old, new)
    assert_golden("mistakes.txt", text)


def test_the_description_of_the_api_lists_the_codes_with_their_meanings() -> None:
    with running_exporter(ready=False) as exporter:
        document = exporter.document("/openapi.json")
    assert document["components"]["schemas"]["ProblemCode"]["enum"] == [code.value for code in ProblemCode]
    described = document["paths"][ACTIONS]["post"]["responses"]
    for code in ProblemCode:
        if (reply := described.get(str(code.status))) is not None:
            assert f"`{code.value}`: {code.meaning}" in reply["description"]


def _command(line: str, replaced: dict[str, str], capsys: pytest.CaptureFixture[str]) -> str:
    words = re.sub("|".join(replaced), lambda found: replaced[found[0]], line)
    status = main(shlex.split(words))
    printed = capsys.readouterr()
    assert status in (1, 2)
    return f"$ gpumem-exporter {line}\n{printed.out}{printed.err}exit status {status}\n"


def _request(sent: Sent, exporter: RunningExporter) -> str:
    headers: dict[str, Any] = {"Content_Type": sent.media_type} if sent.body else {}
    answer = exporter.request(sent.method, sent.path, body=sent.body.encode() or None, **headers)
    document = problem(answer, answer.status)
    body = f"{sent.body[:100]}…" if len(sent.body) > 100 else sent.body
    shown = json.dumps(document, indent=1, ensure_ascii=False)
    of = "" if sent.media_type == JSON else f"Content-Type: {sent.media_type}\n"
    phrase = HTTPStatus(answer.status).phrase
    return f"{sent.method} {sent.path}\n{of}{body}".rstrip() + f"\n{answer.status} {phrase}\n{shown}\n"
