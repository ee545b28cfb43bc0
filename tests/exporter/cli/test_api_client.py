from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from gpumem_client.wire.errors import ConfigurationError, ExporterAnswerError, ExporterUnreachableError
from gpumem_client.wire.http import Answer
from gpumem_exporter.cli import api_client
from gpumem_exporter.cli.api_client import ExporterApi, rights_line
from gpumem_exporter.cli.usage import action_token

_PROBLEM = {"type": "about:blank", "title": "Not Found", "status": 404, "detail": "nothing matches pid=1"}


class _Scripted:
    """A transport with prepared answers that records requests."""

    def __init__(self, *answers: Answer | ExporterUnreachableError) -> None:
        self.answers = list(answers)
        self.requests: list[tuple[str, str, Any, Mapping[str, str], float | None]] = []

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        timeout_seconds: float | None = None,
    ) -> Answer:
        self.requests.append((method, path, body and json.loads(body), headers or {}, timeout_seconds))
        answer = self.answers.pop(0)
        if isinstance(answer, ExporterUnreachableError):
            raise answer
        return answer


def _answer(document: object, status: int = 200) -> Answer:
    return Answer(status, {}, json.dumps(document).encode())


def _refused(url: str) -> ExporterUnreachableError:
    return ExporterUnreachableError(f"no exporter answers at {url}: Connection refused")


@pytest.fixture
def api_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ExporterApi]:
    """Return a function that connects to scripted transports."""

    def make(transports: dict[str, _Scripted], **options: Any) -> ExporterApi:
        monkeypatch.setattr(api_client, "Connection", lambda url, **_: transports[url])
        return ExporterApi(list(transports), **options)

    return make


def test_the_first_address_that_answers_is_kept_and_an_error_names_every_address(
    api_of: Callable[..., ExporterApi],
) -> None:
    first, second = _Scripted(_refused("a")), _Scripted(_answer({"n": 1}), _answer({"n": 2}))
    api = api_of({"a": first, "b": second})
    assert api.url == "a"
    assert [api.get("/x"), api.get("/x")] == [{"n": 1}, {"n": 2}]
    assert api.url == "b"
    assert len(first.requests) == 1
    api = api_of({"a": _Scripted(_refused("a")), "b": _Scripted(_refused("b"))})
    with pytest.raises(ExporterUnreachableError, match=r"\ba: .*\bb: .*gpumem-exporter serve\b.*--url\b"):
        api.get("/x")


@pytest.mark.parametrize(
    ("status", "body", "detail"),
    [
        (404, json.dumps(_PROBLEM).encode(), "nothing matches pid=1"),
        *((502, body, "the server at a answers: Bad Gateway") for body in (b"<html>no</html>", b'{"detail": 3}')),
    ],
)
def test_an_error_has_its_status_and_the_detail_of_a_problem(
    api_of: Callable[..., ExporterApi], status: int, body: bytes, detail: str
) -> None:
    with pytest.raises(ExporterAnswerError) as caught:
        api_of({"a": _Scripted(Answer(status, {}, body))}).get("/x")
    assert (caught.value.status, caught.value.detail) == (status, detail)


@pytest.mark.parametrize("body", [b"[1]", b"\xff"])
def test_another_server_is_not_taken_for_an_exporter(api_of: Callable[..., ExporterApi], body: bytes) -> None:
    with pytest.raises(ExporterUnreachableError, match=r"http://a:1 .*gpumem-exporter"):
        api_of({"http://a:1": _Scripted(Answer(200, {}, body))}).get("/x")


def test_a_public_route_can_receive_the_token_only_after_a_401(api_of: Callable[..., ExporterApi]) -> None:
    transport = _Scripted(_answer({}), _answer({}), _answer(_PROBLEM, 401), _answer({}), _answer({}))
    api = api_of({"a": transport}, token="secret", token_for_reads=False)
    for path in ("/health", "/api/v1/actions", "/api/v1/devices", "/api/v1/processes"):
        api.get(path)
    sent = [(request[1], "Authorization" in request[3]) for request in transport.requests]
    assert sent == [
        ("/health", False),
        ("/api/v1/actions", True),
        ("/api/v1/devices", False),
        ("/api/v1/devices", True),
        ("/api/v1/processes", True),
    ]


def test_an_action_is_posted_with_a_new_idempotency_key(api_of: Callable[..., ExporterApi]) -> None:
    transport = _Scripted(_answer({"id": "1", "state": "done"}), _answer({"id": "2", "state": "done"}))
    api = api_of({"a": transport})
    api.submit({"action": "empty_cache"})
    api.submit({"action": "empty_cache"})
    method, path, body, headers, timeout = transport.requests[0]
    assert (method, path, body) == ("POST", "/api/v1/actions", {"action": "empty_cache", "wait_seconds": 0.0})
    assert headers["Content-Type"] == "application/json"
    assert (timeout or 0.0) > 3.0
    assert len({request[3]["Idempotency-Key"] for request in transport.requests}) == 2


def _file(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_the_token_comes_from_the_option_then_the_variable_then_its_file(tmp_path: Path) -> None:
    option, variable = _file(tmp_path / "o", "of-option\n"), _file(tmp_path / "v", " of-file \n")
    environ = {"GPUMEM_ACTION_TOKEN": "of-variable", "GPUMEM_ACTION_TOKEN_FILE": str(variable)}
    assert action_token(str(option), environ) == "of-option"
    assert action_token(None, environ) == "of-variable"
    assert action_token(None, {"GPUMEM_ACTION_TOKEN_FILE": str(variable)}) == "of-file"
    assert action_token(None, {}) == ""


@pytest.mark.parametrize("content", [" \n", "two tokens", "späß", "nul\0"])
def test_a_file_without_one_token_is_an_error_that_does_not_show_the_content(tmp_path: Path, content: str) -> None:
    with pytest.raises(ConfigurationError, match=str(tmp_path)) as caught:
        action_token(str(_file(tmp_path / "t", content)), {})
    assert not content.strip() or content.strip() not in str(caught.value)


@pytest.mark.parametrize(
    ("rights", "part"),
    [
        ({"rights": "own", "uid": 1001, "processes": 3}, "3 processes (uid 1001)"),
        ({"rights": "all", "uid": 0, "processes": 5}, "all processes"),
        ({"rights": "none", "reason": "a\ntoken"}, "cannot clear processes. a token"),
        ({}, ""),
    ],
)
def test_one_line_says_what_the_caller_may_do(rights: dict[str, Any], part: str) -> None:
    assert part in rights_line(rights, "clear")


@pytest.mark.parametrize("answer", [_answer(_PROBLEM, 404), _answer(_PROBLEM, 503), _answer([]), _refused("a")])
def test_a_result_needs_no_answer_about_the_rights_of_the_caller(
    answer: Any, api_of: Callable[..., ExporterApi]
) -> None:
    api = api_of({"a": _Scripted(answer)})
    assert rights_line(api.rights()) == ""
