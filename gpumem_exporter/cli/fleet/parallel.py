"""The same for each of many, a bounded number at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

__all__ = ["each"]

T = TypeVar("T")
R = TypeVar("R")


def each(items: Sequence[T], work: Callable[[T], R], *, parallel: int) -> list[R]:
    """What `work` gives for each item, in their order; at most `parallel` run at a time.

    The threads are daemons, unlike those of `concurrent.futures`: Ctrl-C need not wait for a node that does not answer.
    The first exception is raised here, once the others have ended.
    """
    results: dict[int, R] = {}
    errors: list[BaseException] = []
    todo = iter(range(len(items)))
    lock = threading.Lock()

    def run() -> None:
        while True:
            with lock:
                place = next(todo, None)
            if place is None or errors:
                return
            try:
                results[place] = work(items[place])
            except BaseException as error:  # noqa: BLE001 - raised by whoever waits
                errors.append(error)

    threads = [
        threading.Thread(target=run, name=f"gpumem-fleet-{number}", daemon=True)
        for number in range(min(parallel, len(items)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[place] for place in range(len(items))]
