"""`doctor`: what is wrong on this machine and how to fix it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpumem_exporter.cli.checks import (
    FAIL,
    PASS,
    WARN,
    Finding,
    check_driver,
    check_driver_elsewhere,
    check_exporter,
    check_socket,
    check_trust,
    is_on_this_machine,
    reach,
    run_check,
)
from gpumem_exporter.cli.connection import action_token, exporter_urls, kube_forward, open_api
from gpumem_exporter.cli.options import connection_options
from gpumem_exporter.cli.program import FAILED
from gpumem_exporter.cli.render.terminal import plain, print_result, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gpumem_exporter.node.provider import Provider

_EXAMPLES = """\b
Examples:
  gpumem-exporter doctor
  gpumem-exporter doctor --url http://gpu-node-7:9844
  kubectl exec -n gpumem POD -- gpumem-exporter doctor    # the exporter's pod
  gpumem-exporter doctor --json | jq '.findings[] | select(.verdict != "PASS")'

\b
Exit code: 1 if a line has FAIL, else 0.
"""

_DRIVER_TIMEOUT_SECONDS = 10.0
_STYLES = {PASS: "green", WARN: "yellow", FAIL: "bold red"}


@click.command(epilog=_EXAMPLES)
@connection_options
def doctor(token_file: str | None, as_json: bool) -> int:
    """Show what is wrong and how to fix it.

    Checks driver, devices, exporter, socket, version, health, permissions, actions, clock, reporters, PID namespace and
    jobs. Run it on the exporter's machine to check the driver, and where training runs to check the connection to the
    exporter. If the driver is on another machine, doctor shows what the exporter reports about it. Nothing is changed.
    """
    findings = tuple(diagnose(token_file))
    verdict = next((each for each in (FAIL, WARN) if any(found.verdict == each for found in findings)), PASS)
    document = {"verdict": verdict, "findings": [asdict(finding) for finding in findings]}
    print_result(document, _lines(findings), as_json=as_json)
    return FAILED if verdict == FAIL else 0


def diagnose(token_file: str | None) -> Iterator[Finding]:
    """Run every check. A check that fails does not stop the others."""
    urls = tuple(exporter_urls())
    with open_api(token_file, token_for_reads=False) as api:
        reached, health = reach(api, urls)
        nearby = is_on_this_machine(api.url) and kube_forward() is None
        if nearby:
            timeout_seconds = _DRIVER_TIMEOUT_SECONDS
            yield from run_check("driver", lambda: check_driver(_driver, health or {}, timeout_seconds=timeout_seconds))
        elif health is not None:
            yield check_driver_elsewhere(health)
        yield reached
        for url in urls:
            if url.startswith("unix://"):
                path = Path(url.removeprefix("unix://"))
                yield from run_check("socket", lambda: check_socket(path, required=len(urls) == 1))  # noqa: B023
        if health is not None:
            yield check_trust(api.objection, nearby=nearby)
            yield from check_exporter(api, health, has_token=bool(action_token(token_file)))


def _driver() -> Provider:
    from gpumem_exporter.node.pynvml_provider import PynvmlProvider

    return PynvmlProvider()


def _lines(findings: Iterable[Finding]) -> Iterator[RenderableType]:
    rows = []
    for finding in findings:
        parts = [plain(finding.detail), *(plain(f"→ {fix}", "italic") for fix in (finding.fix,) if fix)]
        text = plain("").append("\n").join(parts)
        rows.append((plain(finding.verdict, _STYLES[finding.verdict]), plain(finding.check), text))
    yield table("", (("", "left"), ("", "left"), ("", "wrap")), rows)
