"""Alerts with free actions and targets, `gpumem_action` and `gpumem_target_*`: deprecated in 0.4, removed in 0.5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from gpumem_exporter.actions.declarations import (
    ACTIONS,
    MAX_REASON_LENGTH,
    OPTIONS,
    ORPHANS,
    SELECTORS,
    ActionRequest,
    RequestOption,
    Target,
    invalid_fields,
)
from gpumem_exporter.errors import ActionRefusedError

PREFIX = "gpumem_"
_TARGET = "target_"
# The values of an alert's request, by name without the prefix.
_OPTIONS: Mapping[str, RequestOption] = {
    "action": RequestOption({}, choices=ACTIONS),
    **{_TARGET + name: option for name, option in SELECTORS.items()},
    _TARGET + "orphans": ORPHANS,
    _TARGET + "all": RequestOption({}, kind=bool),
    # The step of a group is known to no alert, and what stays free is shown to no caller of an alert.
    **{name: option for name, option in OPTIONS.items() if name not in ("at_step", "settle_seconds")},
    "cooldown_seconds": RequestOption({}, kind=float, least=0, most=30 * 86400.0, unit="seconds"),
}


class AlertRequestError(ActionRefusedError):
    """An alert requests nothing that can be done; the message says why."""


class RequestedAction(NamedTuple):
    """The action that an alert requests."""

    request: ActionRequest
    cooldown_seconds: float
    """The exporter does not act on another firing of the same alert for this time."""


def requested_action(texts: Mapping[str, str], reason: str) -> RequestedAction:
    """Return the action that an alert requests. Raises AlertRequestError if it is invalid."""
    values = {name: _read(name, text) for name, text in texts.items()}
    cooldown_seconds = values.pop("cooldown_seconds", 300.0)
    target = {name.removeprefix(_TARGET): values.pop(name) for name in tuple(values) if name.startswith(_TARGET)}
    given = values.pop("reason", "")
    values["reason"] = (f"{reason}: {given}" if given else reason)[:MAX_REASON_LENGTH]
    request = ActionRequest(target=Target(**target), **values)
    if invalid := invalid_fields(request):
        raise AlertRequestError(
            "; ".join(f"{PREFIX}{each.field.replace('.', '_')}: {each.message}" for each in invalid)
        )
    return RequestedAction(request, cooldown_seconds)


def _read(name: str, text: str) -> Any:
    option = _OPTIONS.get(name)
    # Rejected, because a mistyped name could widen the target.
    if option is None:
        known = ", ".join(f"{PREFIX}{each}" for each in _OPTIONS)
        raise AlertRequestError(f"{PREFIX}{name[:64]} is unknown; the names are {known}")
    try:
        return option.read(text)
    except ValueError:
        raise AlertRequestError(f"{PREFIX}{name}: {text[:64]!r} is invalid: expected {option.expected}") from None
