"""AdmissionReviews of many shapes of pods: the patch applied, and the result validated by Kubernetes' own schema."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from typing import Any

import kubernetes_validate
import pytest

from gpumem_exporter.edge.problems import ProblemCode, ProblemError
from gpumem_exporter.features.webhook import webhook_server
from gpumem_exporter.features.webhook.webhook_server import FORBIDDEN, PODS, answer, create_app
from gpumem_exporter.logs import LogFormatter
from tests.support.builders.pod_shapes import SHAPES, Pod, Shape, answered, container, pod, review_of

RESULT = "gpumem.io/injection"
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def all_containers(changed: Pod) -> dict[str, dict[str, Any]]:
    found = [*changed["spec"].get("initContainers", ()), *changed["spec"]["containers"]]
    return {each["name"]: each for each in found}


def variables(changed: dict[str, Any]) -> dict[str, Any]:
    """The variables of a container: the last definition is in force."""
    return {
        each["name"]: each.get("value", each.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath"))
        for each in changed.get("env", ())
    }


def logged(caplog: pytest.LogCaptureFixture) -> str:
    """The lines of the log, with their fields."""
    return "\n".join(map(LogFormatter().format, caplog.records))


@shapes
def test_each_container_with_a_gpu_gets_the_client(shape: Shape) -> None:
    changed, response = answered(shape.pod)
    volumes = {volume["name"]: volume for volume in changed["spec"].get("volumes", ())}
    before = all_containers(shape.pod)
    for name, container_now in all_containers(changed).items():
        if name not in shape.python_paths:
            assert container_now == before[name]
            continue
        env = variables(container_now)
        assert env["PYTHONPATH"] == shape.python_paths[name]
        assert (env["GPUMEM_DEFAULT_WORKLOAD"], env.get("GPUMEM_DEFAULT_RANK")) == (shape.workload, shape.rank)
        (mount,) = (each for each in container_now["volumeMounts"] if each["mountPath"].rstrip("/") == "/run/gpumem")
        assert mount["readOnly"]
        assert volumes[mount["name"]]["hostPath"] == {"path": "/run/gpumem", "type": "DirectoryOrCreate"}
    assert len(response.get("warnings", ())) == len(shape.left_alone)
    for word, warning in zip(shape.left_alone, response.get("warnings", ()), strict=True):
        assert word in warning
    result = changed["metadata"].get("annotations", {}).get(RESULT, "")
    assert bool(result) == bool(shape.python_paths or shape.left_alone)
    assert [name for name in shape.python_paths if f"injected: {name}" not in result] == []


@shapes
def test_the_changed_pod_is_valid_for_kubernetes_and_keeps_what_it_had(shape: Shape) -> None:
    changed, _ = answered(shape.pod)
    kubernetes_validate.validate(changed, kubernetes_validate.latest_version(), strict=True)
    spec, spec_before = changed["spec"], shape.pod["spec"]
    volumes_before = spec_before.get("volumes", [])
    assert spec.get("volumes", [])[: len(volumes_before)] == volumes_before
    names = [volume["name"] for volume in spec.get("volumes", ())]
    assert len(set(names)) == len(names)
    for name, before in all_containers(shape.pod).items():
        now = all_containers(changed)[name]
        assert {**now, "env": [], "volumeMounts": []} == {**before, "env": [], "volumeMounts": []}
        mounts, mounts_before = (each.get("volumeMounts", []) for each in (now, before))
        assert mounts[: len(mounts_before)] == mounts_before
        paths = [mount["mountPath"] for mount in mounts]
        assert len(set(paths)) == len(paths)
        names_before = {old["name"] for old in before.get("env", ())}
        kept = [each for each in now.get("env", ()) if each["name"] in names_before]
        for old, new in zip(before.get("env", ()), kept, strict=True):
            assert old == new or old["name"] in ("PYTHONPATH", "GPUMEM_DEFAULT_WORKLOAD")


@shapes
def test_a_second_review_changes_nothing(shape: Shape) -> None:
    changed, first = answered(shape.pod)
    again, second = answered(changed)
    assert again == changed
    assert "patch" not in second
    assert second.get("warnings") == first.get("warnings")


def test_a_name_that_is_known_at_the_second_review_replaces_the_first_one() -> None:
    changed, _ = answered(pod(owner=("StatefulSet", "x-0"), name="x-0-1"))
    changed["metadata"]["labels"]["leaderworkerset.sigs.k8s.io/name"] = "x"
    again, _ = answered(changed)
    env = variables(all_containers(again)["trainer"])
    assert env["GPUMEM_DEFAULT_WORKLOAD"] == "x"
    assert "worker-index" in env["GPUMEM_DEFAULT_RANK"]


def test_a_namespace_that_forbids_host_path_gets_the_reason_only() -> None:
    changed, response = answered(SHAPES["indexed job"].pod, forbidden=FORBIDDEN)
    assert FORBIDDEN in response["warnings"][0]
    assert changed["spec"] == SHAPES["indexed job"].pod["spec"]
    assert FORBIDDEN in changed["metadata"]["annotations"][RESULT]
    assert "patch" not in answered(pod(container(gpus=None)), forbidden=FORBIDDEN)[1]


@pytest.mark.parametrize(
    "broken",
    [
        {"object": None},
        {"object": {"spec": {"containers": [{"name": "x"}]}}},
        {"object": {**pod(), "spec": {"containers": [{"name": "x", "env": 1, "resources": {"claims": [1]}}]}}},
        {"operation": "UPDATE"},
        {"kind": {"group": "apps", "version": "v1", "kind": "Deployment"}},
        {"kind": None},
    ],
)
def test_a_review_that_cannot_be_read_admits_the_object_unchanged_with_a_warning(
    broken: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    review = review_of(pod(container(env=[{"name": "WANDB_API_KEY", "value": "s3cret"}])))
    review["request"] |= broken
    response = answer(review)["response"]
    assert (response["allowed"], "patch" in response, len(response["warnings"])) == (True, False, 1)
    assert "s3cret" not in logged(caplog)


def test_no_value_of_a_pod_is_logged_or_sent_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    secret = {"name": "HF_TOKEN", "value": "s3cret"}
    _, response = answered(pod(container(env=[secret, {"name": "PYTHONPATH", "value": "/app"}])))
    assert "injected: trainer" in logged(caplog)
    assert "s3cret" not in logged(caplog)
    assert b"s3cret" not in base64.b64decode(response["patch"])


@pytest.mark.parametrize(
    "document",
    [
        [],
        pod(),
        {"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1", "request": {"object": pod()}},
        {"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1beta1", "request": {"uid": "x"}},
    ],
)
def test_another_document_is_an_error(document: object) -> None:
    with pytest.raises(ProblemError) as raised:
        answer(document)
    assert raised.value.code == ProblemCode.NOT_A_REVIEW


def test_a_pod_with_600_000_names_gets_a_short_answer() -> None:
    names = ",".join(f"n{number}" for number in range(600_000))
    hostile = pod(annotations={"gpumem.io/containers": names})
    hostile["metadata"].setdefault("labels", {})["gpumem.io/inject"] = "true"
    review = answer(review_of(hostile))
    assert len(str(review)) < 20_000
    assert len(review["response"]["warnings"]) == 9
    assert review["response"]["warnings"][-1] == "gpumem: and 56 more"


def test_texts_that_no_pod_may_have_do_not_multiply() -> None:
    hostile = pod(*(container(f"c{number}") for number in range(200)))
    hostile["metadata"].setdefault("labels", {})["jobset.sigs.k8s.io/jobset-name"] = "x" * 1_000_000
    hostile["spec"]["volumes"] = [{"name": "v" * 1_000_000, "hostPath": {"path": "/run/gpumem"}}]
    assert len(str(answer(review_of(hostile)))) < 1_000_000


async def test_a_review_does_not_wait_for_hostile_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ",".join(f"n{number}" for number in range(100_000))
    hostile = json.dumps(review_of(pod(container(), annotations={"gpumem.io/containers": names}))).encode()
    true = json.dumps(review_of(SHAPES["indexed job"].pod)).encode()
    app, answered_in_order, bodies = create_app("/run/gpumem"), list[str](), list[bytes]()
    true_is_answered = threading.Event()

    def answer_at_last(review: Any, **settings: Any) -> Any:
        """The hostile ones take as long as the true one."""
        if names in str(review):
            assert true_is_answered.wait(30)
        return answer(review, **settings)

    monkeypatch.setattr(webhook_server, "answer", answer_at_last)

    async def send_review(name: str, body: bytes) -> None:
        async def receive() -> Any:
            return {"type": "http.request", "body": body}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body" and message.get("body"):
                bodies.append(message["body"])
                answered_in_order.append(name)
                if name == "true":
                    true_is_answered.set()

        scope = {"type": "http", "method": "POST", "path": PODS, "headers": [], "query_string": b""}
        await app(scope, receive, send)

    reviews = [send_review("hostile", hostile) for _ in range(8)]
    await asyncio.gather(*reviews, send_review("true", true))
    assert answered_in_order == ["true"] + ["hostile"] * 8
    assert "patch" in json.loads(bodies[0])["response"]
