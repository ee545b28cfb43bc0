"""The sentences about clears and other actions, which page, terminal and commands show alike. Pure.

An action and a result are the documents of the HTTP API, or rows with the same keys.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpumem_client.wire.units import counted, human_bytes
from gpumem_exporter.actions.kinds import KINDS, is_done

Document = Mapping[str, Any]

# The share of what a clear would free from which a sentence says that it would be reserved again.
_WORTH_SAYING = 0.05
_NAMED_JOBS_MAX = 8


def stays_free(stays_free_bytes: int, again_bytes: int, *, at_least: bool = False, at_step: bool = False) -> str:
    """Return `Stays free 2.2 GiB; 18.0 GiB more would be reserved again in the next step`, without a period.

    With `at_least`, the idle cache of a process is not known. With `at_step`, a job that trains reserves the rest.
    """
    text = f"Stays free {'at least ' if at_least else ''}{human_bytes(stays_free_bytes)}"
    if again_bytes > 0 and again_bytes >= _WORTH_SAYING * (stays_free_bytes + again_bytes):
        text += f"; {human_bytes(again_bytes)} more would be reserved again{' in the next step' if at_step else ''}"
    return text


def job_name(result: Document) -> str:
    """Return the name of a result's job."""
    return str(result.get("job") or result.get("workload") or f"pid {result['pid']}")


def subject(results: Iterable[Document]) -> str:
    """Return the job of some results, or the number of their processes: `llm (4 ranks)`, `12 processes`."""
    # Equal pids on two nodes are two processes.
    processes = {(result.get("instance"), result["pid"]): result for result in results}
    names = {(job_name(result), bool(result.get("workload"))) for result in processes.values()}
    name, of_workload = next(iter(names), ("", False))
    if len(names) != 1 or (len(processes) > 1 and not of_workload):
        return counted(len(processes), "process", "processes")
    ranks = [result.get("rank") or "" for result in processes.values()]
    if len(ranks) == 1:
        return f"{name} rank {ranks[0]}" if ranks[0] else name
    return f"{name} ({len(ranks)} {'ranks' if all(ranks) else 'processes'})"


def subjects(results: Iterable[Document]) -> str:
    """Return the jobs of some results, by name."""
    jobs: dict[object, list[Document]] = {}
    for result in results:
        # Two users may have the same workload. Their ranks act after different steps.
        jobs.setdefault((result["workload"] or result["pid"], result.get("at_step")), []).append(result)
    more = len(jobs) - _NAMED_JOBS_MAX
    return ", ".join(map(subject, [*jobs.values()][:_NAMED_JOBS_MAX])) + (f" and {more} more" if more > 0 else "")


def timing(action: Document) -> str:
    """Return when the processes of a dry run would act; empty if all would act at once."""
    modes: dict[str, list[Document]] = {}
    for result in action["results"]:
        if is_done(result["outcome"]):
            modes.setdefault(result.get("mode") or "now", []).append(result)
    within, texts = _limit(action, "within"), []
    if at_step := modes.get("step"):
        texts.append(f"At the end of a step{within}: {subjects(at_step)}.")
    if idle := modes.get("idle"):
        why = "; ".join(dict.fromkeys(result["reason"] for result in idle if result.get("reason")))
        texts.append(f"When idle{within}: {subjects(idle)}{f', because {why}' if why else ''}.")
    if texts and "now" in modes:
        texts.append(f"At once: {subject(modes['now'])}.")
    return " ".join(texts)


def sentence(action: Document) -> str:
    """Return what an action waits for, what it did, or in a dry run what it would do."""
    results = action["results"]
    if action["state"] in ("queued", "running"):
        return waiting(action)
    if not results:
        return "No process matches the target: there is nothing to do." if action["state"] == "done" else ""
    done = [result for result in results if is_done(result["outcome"])]
    act, acted = ("would act", "No process would act.") if action["dry_run"] else ("acted", "No process acted.")
    if not done:
        return acted
    text = _clear(action, done) if action["action"] == "empty_cache" else _effect(action, done)
    if action["dry_run"] and (when_ := timing(action)):
        text = f"{text} {when_}"
    count, all_count = (len({(each.get("instance"), each["pid"]) for each in some}) for some in (done, results))
    return text if count == all_count else f"{text} {count} of {all_count} processes {act}."


def waiting(action: Document) -> str:
    """Return what a running action waits for."""
    if engines := action.get("waits_for"):
        return " ".join(map(_engine_wait, engines))
    pending, at_most, texts = action.get("pending") or (), _limit(action, "at most"), []
    if at_step := [part for part in pending if part["mode"] == "step"]:
        texts.append(f"Waiting for the end of a step of {subjects(at_step)}{at_most}.")
    if idle := [part for part in pending if part["mode"] == "idle"]:
        texts.append(f"Waiting for {subjects(idle)} to be idle{at_most}.")
    return " ".join(texts) or f"Waiting for {subject(pending) if pending else 'the processes'}."


def _limit(action: Document, words: str) -> str:
    """Return how long the processes of an action wait; a sleep waits for an idle engine for a time of its own."""
    seconds = action.get("wait_idle_seconds") or action.get("deadline_seconds")
    return f", {words} {seconds:g} s" if seconds else ""


def _engine_wait(wait: Document) -> str:
    engine = f"pid {wait['pid']}" + (f" ({wait['title']})" if wait["title"] else "")
    until = time.strftime("%H:%M:%S UTC", time.gmtime(wait["until_unix_seconds"]))
    return f"Waiting until the engine in {engine} has started on GPU {wait['gpu'] or wait['uuid']}, until {until}."


def _known(results: Sequence[Document], field: str = "freed_bytes") -> tuple[list[Document], int, str]:
    """Return the results with a value, the sum of the values, and `at least ` if a result has none."""
    known = [result for result in results if result.get(field) is not None]
    return known, sum(result[field] for result in known), "at least " if len(known) < len(results) else ""


def _effect(action: Document, done: Sequence[Document]) -> str:
    kind, (known, freed, least) = KINDS[action["action"]], _known(done)
    verb, frees = (f"Would {kind.deed[0]}", "would free") if action["dry_run"] else (kind.deed[1], "freed")
    size = f", which {frees} {least}{human_bytes(freed)}" if kind.outside and known else ""
    return f"{verb.format(subject(done))}{size}."


def _clear(action: Document, done: Sequence[Document]) -> str:
    known, freed, least = _known(done)
    settled, still_free, _ = _known(known, "still_free_bytes")
    again = sum(result["freed_bytes"] for result in settled) - still_free
    at_least = bool(least) or any(result["freed_bytes"] for result in known if result not in settled)
    if not action["dry_run"]:
        if not known:
            return f"Cleared {subject(done)}; the freed memory is not known."
        if not settled or action.get("settling") or not freed:
            return f"Freed {least}{human_bytes(freed)} in {subject(done)}."
        rest = f"; {human_bytes(again)} more was reserved again within {action['settle_seconds']:g} s" if again else ""
        return f"Stays free {'at least ' if at_least else ''}{human_bytes(still_free)} in {subject(done)}{rest}."
    if not known:
        return "It is not known how much memory a clear would free."
    if not freed and not least:
        return "A clear would free nothing."
    if not settled:
        return f"Would free {least}{human_bytes(freed)} now; how much of it stays free is not known yet."
    at_step = all(each.get("step") for each in settled if each["freed_bytes"] > each["still_free_bytes"])
    return f"{stays_free(still_free, again, at_least=at_least, at_step=at_step)}."
