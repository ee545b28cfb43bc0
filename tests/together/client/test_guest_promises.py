"""A training process is not affected by its exporter, whatever happens to the exporter."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import StartExporter
from tests.emulation.fixtures import StartTorch
from tests.emulation.node import EmulatedNode
from tests.emulation.torch_process import TorchProcess
from tests.support.servers.exporter_process import QUICK
from tests.support.servers.recording_exporter import RecordingExporter
from tests.support.servers.scripted_peer import scripted_peer
from tests.support.waiting import patient, wait_for

TRAIN = """
import hashlib
torch.set_num_threads(1)
torch.manual_seed(7)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters())
ballast = torch.empty(8 << 20, dtype=torch.uint8, device='cuda')
taken = torch.cuda.memory_stats(0)['allocated_bytes.all.allocated']
for step in range(steps):
    model(torch.randn(16, 64)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    del ballast
    ballast = torch.empty((8 + step % 3) << 20, dtype=torch.uint8, device='cuda')
digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(parameter.detach().numpy().tobytes())
result = [digest.hexdigest(), torch.cuda.memory_stats(0)['allocated_bytes.all.allocated'] - taken]
"""
"""A loop that computes on the CPU, whose results are correct, and allocates through CUDA's allocator."""


def train(process: TorchProcess, steps: int = 150) -> list[object]:
    answer = process.exec(TRAIN, steps=steps, timeout_seconds=100)
    assert isinstance(answer, list)
    return answer


@contextlib.contextmanager
def imposter(path: Path, talk: Callable[[socket.socket], None]) -> Iterator[list[socket.socket]]:
    """Listen in place of the exporter, and call `talk` with each connection. Yields the connections."""
    with scripted_peer(lambda connection, _: talk(connection), str(path)) as peer:
        yield peer.connections


def hang(connection: socket.socket) -> None:
    """Accept the report and send no reply."""


def talk_garbage(connection: socket.socket) -> None:
    connection.recv(1 << 16)
    connection.sendall(b"\x16\x03\x01 this is not HTTP\r\n\r\n")
    connection.shutdown(socket.SHUT_RDWR)


def answer(status: str, body: bytes) -> Callable[[socket.socket], None]:
    def talk(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(
            f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body
        )
        connection.shutdown(socket.SHUT_RDWR)

    return talk


IMPOSTERS = {
    "hangs": hang,
    "talks garbage": talk_garbage,
    "answers 500": answer("500 Internal Server Error", b"oops"),
    "answers with something else": answer("200 OK", b'{"commands": [{"id": 5}]}'),
    "answers with no JSON": answer("200 OK", b"<html>"),
    "requests an unknown action": answer(
        "200 OK", b'{"commands": [{"id": "a", "action": "melt", "deadline_seconds": 9}], "novelty": 1}'
    ),
}


def test_training_has_the_same_results_with_any_behavior_of_the_exporter(
    node: EmulatedNode, start_torch: StartTorch, tmp_path: Path
) -> None:
    alone = train(start_torch())
    watched = start_torch(GPUMEM_EXPORTER_URL=f"unix://{tmp_path}/exporter.sock")
    watched.call("start_client")
    assert train(watched) == alone, "with no exporter at all"
    for name, talk in IMPOSTERS.items():
        with imposter(tmp_path / "exporter.sock", talk) as connections:
            wait_for(lambda connections=connections: len(connections), f"a connection to an exporter that {name}")  # type: ignore[misc]
            assert train(watched) == alone, name
        (tmp_path / "exporter.sock").unlink()
    assert watched.finish() == 0
    assert "Traceback" not in watched.stderr()


def test_failed_reports_draw_no_random_numbers_and_leave_no_garbage(start_torch: StartTorch, tmp_path: Path) -> None:
    with imposter(tmp_path / "exporter.sock", IMPOSTERS["answers with no JSON"]) as connections:
        process = start_torch(GPUMEM_EXPORTER_URL=f"unix://{tmp_path}/exporter.sock")
        process.exec("import random; random.seed(7); seeded = random.getstate(); torch.empty(1, device='cuda')")
        process.call("start_client")
        wait_for(lambda: len(connections) > 1, "two reports to fail")
        process.exec("import gc; gc.disable(); gc.collect()")
        before = len(connections)
        wait_for(lambda: len(connections) > before + 1, "two more")
        assert process.exec("result = [random.getstate() == seeded, gc.collect()]") == [True, 0]


def test_training_goes_on_while_the_exporter_is_killed_stopped_and_started_again(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch
) -> None:
    alone = train(start_torch())
    exporter = start_exporter(node, *QUICK)
    watched = start_torch(GPUMEM_EXPORTER_URL=exporter.url)
    watched.call("start_client")
    assert train(watched) == alone
    exporter.wait_for_processes(watched.pid)
    for disturb in (
        lambda: exporter.signal(signal.SIGSTOP),
        lambda: exporter.signal(signal.SIGCONT),
        lambda: exporter.stop(signal.SIGKILL),
        exporter.start,
        lambda: exporter.stop(signal.SIGTERM),
        exporter.start,
    ):
        disturb()
        assert train(watched) == alone
    exporter.wait_for_processes(watched.pid)
    assert watched.finish() == 0
    assert "Traceback" not in watched.stderr()


def hang_up(connection: socket.socket) -> None:
    """Reply to a report as an exporter does, and close the connection before the next one."""
    body = b'{"report_interval_seconds": 0.2, "commands": []}'
    connection.recv(1 << 16)
    connection.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def test_a_program_with_the_default_sigpipe_survives_the_exporter(start_torch: StartTorch, tmp_path: Path) -> None:
    with imposter(tmp_path / "exporter.sock", hang_up) as connections:
        process = start_torch(GPUMEM_EXPORTER_URL=f"unix://{tmp_path}/exporter.sock")
        process.exec("import signal; signal.signal(signal.SIGPIPE, signal.SIG_DFL); torch.empty(1, device='cuda')")
        process.call("start_client")
        wait_for(lambda: len(connections) > 2 or process.returncode is not None, "three connections to be lost")
    assert process.finish() == 0


def test_sigwait_in_the_program_receives_the_signal(start_torch: StartTorch, tmp_path: Path) -> None:
    with imposter(tmp_path / "exporter.sock", hang) as connections:
        # numpy's threads would receive the signal, too
        process = start_torch(GPUMEM_EXPORTER_URL=f"unix://{tmp_path}/exporter.sock", OPENBLAS_NUM_THREADS="1")
        process.exec("torch.empty(1, device='cuda')")
        process.call("start_client")
        wait_for(lambda: len(connections), "the reporter to run")
        waited_for = process.exec(
            """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
os.kill(os.getpid(), signal.SIGUSR1)
result = signal.sigwait({signal.SIGUSR1})
"""
        )
    assert waited_for == signal.SIGUSR1
    assert process.finish() == 0


def test_the_reporter_s_thread_imports_nothing(start_torch: StartTorch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(patient(60))
        process = start_torch(GPUMEM_EXPORTER_URL=f"https://localhost:{listener.getsockname()[1]}")
        process.exec(
            """
import sys, threading
imported = []
def note(event, arguments):
    if event == "import" and threading.current_thread().name == "gpumem-reporter":
        imported.append(arguments[0])
sys.addaudithook(note)
torch.empty(1, device="cuda")
"""
        )
        process.call("start_client")
        for _ in range(3):
            listener.accept()[0].close()
    assert process.exec("result = imported") == []


EXIT_SLOWLY = """
import sys, time, types
from gpumem_client import torch_access
from gpumem_client.profile.heap_reader import HeapReader
torch.empty(1, device="cuda")
class EndsSlowly:
    def __del__(self, sleep=time.sleep):
        sleep(2)  # delays the end of the interpreter until after the call of torch
sys.modules["slow"] = types.ModuleType("slow")
sys.modules["slow"].end = EndsSlowly()

def slow(function, empty_cache=torch.cuda.empty_cache):
    def with_a_slow_call(*arguments, **named):
        kept = [torch.empty(30 << 20, dtype=torch.uint8, device="cuda") for _ in range(3)]
        del kept
        empty_cache()  # some time in C++, without the GIL
        return function(*arguments, **named)
    return with_a_slow_call
"""
# What the reporter's thread does in torch when the process ends: the slow part of it, and the command.
SLOW_WORK = {
    "a clear": ("torch.cuda.empty_cache = slow(torch.cuda.empty_cache)", "empty_cache"),
    "the search of a profile": ("HeapReader.naming = slow(HeapReader.naming)", "profile"),
    "the end of a recording": ("torch_access.stop_history = slow(torch_access.stop_history)", None),
}


@pytest.mark.parametrize("work", SLOW_WORK)
def test_a_process_that_ends_while_its_reporter_is_in_torch_exits_normally(
    node: EmulatedNode, start_torch: StartTorch, tmp_path: Path, work: str
) -> None:
    setup, action = SLOW_WORK[work]
    with RecordingExporter(tmp_path / "exporter.sock") as exporter:
        process = start_torch(GPUMEM_EXPORTER_URL=exporter.url)
        process.exec(f"{EXIT_SLOWLY}{setup}\nimport gpumem_client; gpumem_client.start(oom_profile={action is None})")
        wait_for(lambda: exporter.reports, "a report")
        with node.slow("cudaFree", 400) as frees:
            if action is not None:
                exporter.commands.append({"id": "a", "action": action, "deadline_seconds": 60})
                wait_for(lambda: frees.hits, "the slow call")
            assert process.finish() == 0
    assert "terminate called" not in process.stderr()


def test_a_forked_child_neither_reports_its_parent_s_bytes_nor_disturbs_it(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch
) -> None:
    exporter = start_exporter(node, *QUICK)
    parent = start_torch(GPUMEM_EXPORTER_URL=exporter.url)
    parent.call("start_client")
    parent.call("alloc", nbytes=64 << 20)
    exporter.wait_for_processes(parent.pid)
    child = parent.exec(
        # the child trains on the CPU: its steps must not read the parent's allocator
        "import os, time, warnings\n"
        "warnings.simplefilter('ignore')\n"
        "result = os.fork()\n"
        "if result == 0:\n"
        "    model = torch.nn.Linear(4, 4)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    for _ in range(200):\n"
        "        model(torch.randn(2, 4)).sum().backward()\n"
        "        optimizer.step()\n"
        "        time.sleep(0.01)\n"
        "    os._exit(7)\n"
    )
    reports = exporter.metrics().value("gpumem_reports_total", outcome="accepted")
    wait_for(
        lambda: exporter.metrics().value("gpumem_reports_total", outcome="accepted") > reports + 5, "further reports"
    )
    assert set(exporter.processes()) == {parent.pid}
    status = parent.exec("_, status = os.waitpid(child, 0)\nresult = os.waitstatus_to_exitcode(status)", child=child)
    assert status == 7
    exporter.metrics().assert_ledgers_add_up()


def test_an_exporter_cannot_make_a_process_do_what_its_owner_does_not_allow(
    start_torch: StartTorch, tmp_path: Path
) -> None:
    with RecordingExporter(tmp_path / "exporter.sock", interval_seconds=0.05) as exporter:
        process = start_torch(GPUMEM_EXPORTER_URL=exporter.url, GPUMEM_ACTIONS="clear,snapshot")
        process.exec("import gpumem_client; torch.empty(1, device='cuda'); gpumem_client.start()")
        reported = wait_for(lambda: exporter.reports, "a report")
        assert set(reported[0]["actions"]) == {"empty_cache", "snapshot"}
        asked: dict[str, dict[str, Any]] = {
            "profile": {"action": "profile"},
            "gc": {"action": "empty_cache", "collect_garbage": True},
            "step": {"action": "reset_peak", "mode": "step"},
            "clear": {"action": "empty_cache"},
        }
        exporter.commands += [{"id": name, "deadline_seconds": 60, **each} for name, each in asked.items()]
        wait_for(lambda: all(map(exporter.result, asked)), "the results")
        codes = {name: (exporter.result(name) or {}).get("reason_code") for name in asked}
        assert codes == {**dict.fromkeys(("profile", "gc", "step"), "denied_by_owner"), "clear": None}
        process.exec("gpumem_client.start(actions=['snapshot'])")
        wait_for(lambda: exporter.reports[-1].get("actions") == ["snapshot"], "a later start to narrow it")
        assert "empty_cache" in exporter.reports[-1]["denied_actions"]
