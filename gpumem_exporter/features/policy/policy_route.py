"""`POST /-/reload`: read the policy file again. The request guard has authorized the caller."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Request, Response
from pydantic import Field
from typing_extensions import TypedDict

from gpumem_client.wire.errors import ConfigurationError
from gpumem_exporter.edge.connections import Exchange
from gpumem_exporter.edge.problems import ProblemCode, ProblemError, problems
from gpumem_exporter.edge.replies import json_reply, json_response
from gpumem_exporter.edge.request_guard import RELOAD_PATH

if TYPE_CHECKING:
    from gpumem_exporter.features.policy.policy_runner import PolicyRunner


class RuleDocument(TypedDict):
    """A rule in force; `stopped` is the number of processes or workloads where it has stopped."""

    name: str
    dry_run: bool
    stopped: int
    stopped_until: Annotated[str | None, Field(description="when the last of these stops ends")]


class RulesDocument(TypedDict):
    """The rules in force."""

    rules: list[RuleDocument]


def policy_router(policies: PolicyRunner | None) -> APIRouter:
    """Return the route that reloads the policy; `policies` is None without `--policy.file`."""
    router = APIRouter(tags=["policy"])

    @router.post(RELOAD_PATH, responses={200: json_reply(RulesDocument), **problems(401, 403, 404, 422)})
    async def reload(request: Request) -> Response:
        """Read the policy file again. An invalid file changes nothing."""
        if policies is None:
            detail = "nothing to reload: the exporter was started without --policy.file; restart it with that option"
            raise ProblemError(ProblemCode.NO_POLICY, detail)
        try:
            rules = await policies.reload(str(Exchange.of(request).caller))
        except ConfigurationError as error:
            raise ProblemError(ProblemCode.INVALID_POLICY, f"nothing has changed: {error}") from None
        listed = [
            {
                "name": rule.name,
                "dry_run": rule.dry_run,
                "stopped": len(policies.evaluator.stopped(rule.name)),
                "stopped_until": policies.stopped_until(rule.name),
            }
            for rule in rules
        ]
        return json_response({"rules": listed})

    return router
