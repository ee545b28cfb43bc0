"""Functions that benchmarks run inside the observed process, together with torch and the client."""

from __future__ import annotations

import http.client
import resource
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import torch


def sample_costs(devices: int, rounds: int) -> dict[str, list[float]]:
    """Return CPU times in µs of a sample of all devices and of `torch.cuda.memory_stats()` on each, taken in turns.

    Each runs 20 times in a row.
    """
    from gpumem_client.allocator.allocator import Allocator  # other versions have it elsewhere

    allocator = Allocator.attach()
    if allocator is None:
        raise RuntimeError("CUDA is not initialized")

    def sample() -> None:
        allocator.samples()
        allocator.pinned_host_bytes()

    def memory_stats() -> None:
        for device in range(devices):
            torch.cuda.memory_stats(device)

    works: dict[str, Callable[[], None]] = {"sample": sample, "memory_stats": memory_stats}
    costs: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            started = time.thread_time_ns()
            for _ in range(20):
                work()
            costs[name].append((time.thread_time_ns() - started) / 20 / 1e3)
    allocator.detach()
    return costs


def reporter_thread() -> int | None:
    """Return the thread ID of the client's reporter; None until it runs."""
    return next((thread.native_id for thread in threading.enumerate() if thread.name == "gpumem-reporter"), None)


class PlainPosts:
    """A thread that posts a body with `http.client` once per interval, and does nothing else.

    Attributes:
        count: Number of answered posts.
        thread: Its `native_id` names it in /proc.
    """

    def __init__(self, path: str, body: str, interval_seconds: float) -> None:
        self.count = 0
        self._path = path
        self._body = body.encode()
        self._interval_seconds = interval_seconds
        self._ended = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()
        self.thread.join()

    def _run(self) -> None:
        connection = http.client.HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(self._path)
        while not self._ended.wait(self._interval_seconds):
            connection.request("POST", "/metrics", self._body, {"Content-Type": "application/json"})
            with connection.getresponse() as response:
                response.read()
            self.count += 1


def serve_echo() -> int:
    """Answer every byte on a TCP port with the same byte, from a thread; return the port."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        client, _ = listening.accept()
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with client:
            while part := client.recv(1):
                client.sendall(part)

    threading.Thread(target=serve, daemon=True).start()
    port: int = listening.getsockname()[1]
    return port


def training_cpu_seconds(seconds: float) -> float:
    """Train a small model for about `seconds`. Returns the CPU seconds of the whole process per step."""
    if not _trained:
        layers = [part for _ in range(4) for part in (torch.nn.Linear(512, 512), torch.nn.GELU())]
        model = torch.nn.Sequential(*layers).cuda()
        _trained.extend((model, torch.optim.AdamW(model.parameters())))
    model, optimizer = _trained
    steps, used = 0, time.process_time()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        model(torch.randn(8, 64, 512, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    return (time.process_time() - used) / steps


_trained: list[Any] = []
"""The model and its optimizer."""


def busy(seconds: float) -> dict[str, float]:
    """Compute in pure Python without ever releasing the GIL voluntarily.

    Returns:
        `round_cpu_seconds`: CPU time of the whole process per round; `waited_ms`: the longest wait for the GIL between
        two rounds, a gap of more than 1 ms in which the thread slept (a voluntary context switch).
    """
    longest = 0.0
    rounds = 0
    clock, usage, thread = time.perf_counter, resource.getrusage, resource.RUSAGE_THREAD
    used = time.process_time()
    started = last = clock()
    sleeps = usage(thread).ru_nvcsw
    while last < started + seconds:
        x = 0
        for i in range(200):
            x += i * i
        rounds += 1
        slept = usage(thread).ru_nvcsw
        now = clock()
        if slept != sleeps and now - last > 0.001:
            longest = max(longest, now - last)
        sleeps, last = slept, now
    return {"round_cpu_seconds": (time.process_time() - used) / rounds, "waited_ms": 1e3 * longest}
