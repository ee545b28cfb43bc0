"""A reporter's start and stop, at the same time or without a thread; without torch and without a network."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import pytest

import gpumem_client
from gpumem_client import torch_access
from gpumem_client.allocator.allocator import Allocator
from gpumem_client.hooks.out_of_memory import OutOfMemoryObserver
from gpumem_client.hooks.steps import Steps
from gpumem_client.reporter import reporter as module
from gpumem_client.reporter.reporter import Reporter
from gpumem_client.reporter.reporter_settings import ReporterSettings
from tests.support.waiting import patient, wait_for

SETTINGS = ReporterSettings.resolve(environ={"GPUMEM_EXPORTER_URL": "unix:///nowhere/exporter.sock"})


@pytest.fixture(autouse=True)
def _cuda_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def start_at_once(callback: Callable[[], None]) -> Callable[[], None]:
        callback()
        return lambda: None

    monkeypatch.setattr(module, "when_cuda_starts", start_at_once)


def new_reporter() -> Reporter:
    return Reporter(SETTINGS, Steps(), OutOfMemoryObserver())


def reporter_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "gpumem-reporter"]


def test_a_signal_handler_may_stop_a_reporter_that_is_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    reporter = new_reporter()
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if thread.name == "gpumem-reporter":
            reporter.stop()  # as a signal handler in the starting thread would
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    training = threading.Thread(target=reporter.start, daemon=True)
    training.start()
    training.join(patient(60))
    assert not training.is_alive()
    for thread in reporter_threads():
        thread.join(patient(60))
    assert not reporter_threads()


def test_signals_stay_unblocked_if_threads_are_greenlets(monkeypatch: pytest.MonkeyPatch) -> None:
    reporter = new_reporter()

    def begin_here(thread: threading.Thread) -> None:
        reporter.stop()
        thread.run()

    monkeypatch.setattr(threading.Thread, "start", begin_here)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        reporter.start()
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_if_no_thread_can_be_started_the_error_is_logged_and_start_may_be_called_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start = threading.Thread.start

    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none_left)
    module.start_reporter(SETTINGS)
    assert caplog.text.count("can't start new thread") == 1
    monkeypatch.setattr(threading.Thread, "start", start)
    module.start_reporter(SETTINGS)
    assert len(reporter_threads()) == 1
    gpumem_client.stop()
    assert not reporter_threads()


def test_a_forked_child_that_initializes_cuda_has_a_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_starts: list[Callable[[], None]] = []

    def wait(callback: Callable[[], None]) -> Callable[[], None]:
        cuda_starts.append(callback)
        return lambda: None

    monkeypatch.setattr(module, "when_cuda_starts", wait)
    reporter = new_reporter()
    reporter.start()
    child = os.fork()
    if child == 0:
        alive = []
        try:
            cuda_starts[0]()
            alive = [thread.is_alive() for thread in reporter_threads()]
            reporter.stop(patient(60))
        finally:
            os._exit(0 if alive == [True] and not reporter_threads() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    cuda_starts[0]()
    assert len(reporter_threads()) == 1
    reporter.stop(patient(60))
    assert not reporter_threads()


def test_calls_at_exit_and_after_a_fork_are_removed_when_the_thread_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[str] = []

    def hook(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
        def install(_: Callable[[], None]) -> Callable[[], None]:
            installed.append(name)
            return lambda: installed.remove(name)

        return install

    monkeypatch.setattr(module, "at_exit", hook("exit"))
    monkeypatch.setattr(module, "after_fork_in_child", hook("fork"))
    busy = threading.Event()
    monkeypatch.setattr(Reporter, "_report", lambda _: busy.wait(patient(60)))
    for _ in range(2):
        busy.clear()
        reporter = new_reporter()
        reporter.start()
        assert installed == ["exit", "fork"]
        reporter.stop(0.01)
        assert installed == ["exit", "fork"], "a thread that comes back from torch must find the interpreter alive"
        busy.set()
        for thread in reporter_threads():
            thread.join(patient(60))
        assert installed == []


def test_an_allocator_that_cannot_be_read_is_tried_rarely_and_stop_does_not_wait_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attached: list[int] = []

    def broken() -> None:
        attached.append(1)
        raise RuntimeError("internal")

    monkeypatch.setattr(Allocator, "attach", broken)
    reporter = new_reporter()
    reporter.start()
    wait_for(lambda: "tried every 60 s" in caplog.text, "the line")
    assert len(attached) == 3
    reporter.stop(patient(60))
    assert not reporter_threads()


def test_the_exit_waits_for_a_stopped_reporter_that_is_still_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if another one was started since."""
    inside, leave, order = threading.Event(), threading.Event(), list[str]()

    def in_torch_until_released(_: Reporter) -> None:
        if not inside.is_set():
            with torch_access.in_torch():
                inside.set()
                assert leave.wait(patient(60))
                order.append("left torch" if torch_access.stopping() else "went on")

    monkeypatch.setattr(Reporter, "_report", in_torch_until_released)
    ends: list[Callable[[], None]] = []

    def at_exit(end: Callable[[], None]) -> Callable[[], None]:
        ends.append(end)
        return lambda: None

    monkeypatch.setattr(module, "at_exit", at_exit)
    reporter = new_reporter()
    reporter.start()
    assert inside.wait(patient(60))
    reporter.stop(0.01)
    new_reporter().start()
    ending = threading.Thread(target=ends[0])
    ending.start()
    ending.join(0.2)
    assert ending.is_alive()
    leave.set()
    ending.join(patient(60))
    assert order == ["left torch"]
