"""Leaks of real training loops on the emulated node are found and named, without false alarms."""

from __future__ import annotations

import re

import pytest

from tests.emulation.fixtures import StartTorch

LOOP = """
import random
import gpumem_toolkit as toolkit
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 256)).to("cuda")
optimizer = torch.optim.AdamW(model.parameters())

class Logger:
    def __init__(self):
        self.outputs = []
    def __getattr__(self, name):
        raise SystemExit("an attribute was read: " + name)

def run(kind, seed):
    rng = random.Random(seed)
    reported, logger, history, total = [], Logger(), [], 0
    detector = toolkit.leak_detector(on_leak=reported.append)
    at = 0
    for at in range(220):
        rows = min(64 + 16 * at, 2000) if kind == "longer batches" else rng.randrange(64, 640)
        output = model(torch.empty(rows, 256, device="cuda"))
        loss = output.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if kind == "a list":
            history.append(torch.empty(96 << 10, dtype=torch.uint8, device="cuda"))
        if kind == "an attribute":
            logger.outputs.append(output.detach()[:96].clone())
        if kind == "a graph":
            total = total + model(torch.empty(32, 256, device="cuda")).mean()
        if kind == "many shapes":
            history.append(torch.empty(96 + at, 512, dtype=torch.uint8, device="cuda"))
        if reported:
            break
    detector.stop()
    return {
        "step": at,
        "leak": str(reported[0]) if reported else "",
        "suspects": reported[0].suspects if reported else (),
        "rate": reported[0].bytes_per_step if reported else 0,
    }
"""


def test_leaks_are_found_within_200_steps_and_their_holder_is_named(start_torch: StartTorch) -> None:
    process = start_torch(PYTORCH_CUDA_ALLOC_CONF=None)
    process.exec(LOOP)
    holders = {
        "a list": r"\blist\b.*\b1\d\d\b.*\bhistory\b",
        "an attribute": r"\blist\b.*\b1\d\d\b.*\boutputs\b.*\bLogger\b",
        "many shapes": r"\blist\b.*\b1\d\d\b.*\bhistory\b",
        "a graph": r"\btotal\b",
    }
    for kind in ("none", "longer batches"):
        assert process.exec("result = run(given, 1)", given=kind)["leak"] == "", kind
    for kind, holder in holders.items():
        reported = process.exec("result = run(given, 3)", given=kind)
        assert reported["step"] < 200, kind
        first = reported["suspects"][0]
        assert re.search(holder, first), reported["leak"]
        assert reported["rate"] == pytest.approx(96 << 10, rel=0.2)
    assert "autograd graph" in first


TRAINED = """
import gpumem_client as client
from gpumem_toolkit.integrations.training_watch import TrainingWatch
watch, kept, values = TrainingWatch(leaks=True), [], {}
while "gpumem/leak_bytes_per_step" not in values and len(kept) < 78:
    watch.step_starts(batch_size=1)
    kept.append(torch.empty(100 << 20, dtype=torch.uint8, device="cuda"))
    client.step()
    watch.step_ends()
    values = watch.values()
watch.stop()
result = len(kept), values["gpumem/leak_bytes_per_step"]
"""


def test_a_trainers_logger_gets_the_rate_of_a_leak(start_torch: StartTorch) -> None:
    steps, rate = start_torch(PYTORCH_CUDA_ALLOC_CONF=None).exec(TRAINED)
    assert steps > 1
    assert rate == pytest.approx(100 << 20, rel=0.05)


WALKED = """
import gc
import gpumem_toolkit as toolkit
class Wraps(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *arguments, **named):
        raise SystemExit("the program's own code was called")
def made(*shape):
    return torch.empty(*shape, device="cuda")
wrapped = made(8).as_subclass(Wraps)
outputs = {"a": [made(9) for _ in range(5)]}
shared = made(100)
views = [shared[:10], shared[:10]]
walked = toolkit.lingering_tensors(max_groups=50)
result = {
    "groups": {"x".join(map(str, g.shape)): [g.count, g.bytes, list(g.referrers)] for g in walked.groups},
    "short": toolkit.lingering_tensors(max_objects=10).complete,
    "late": toolkit.lingering_tensors(max_seconds=0.0).complete,
}
del wrapped, outputs, shared, views
gc.collect()
result["left"] = torch.cuda.memory_allocated()
"""


def test_live_tensors_are_grouped_and_named_without_running_the_user_s_code(
    start_torch: StartTorch,
) -> None:
    reported = start_torch(PYTORCH_CUDA_ALLOC_CONF=None).exec(WALKED)
    groups = reported["groups"]
    assert groups["8"][1] == 32
    count, nbytes, holders = groups["9"]
    assert (count, nbytes) == (5, 180)
    assert re.match(r"list of 5\b.*\bdict of 1\b.*'a'.*\bdict\b.*'outputs'.*\bnamespace\b.*\bWorker\b", holders[0])
    assert groups["100"][:2] == [1, 400]
    assert groups["10"][:2] == [2, 0], "views share the storage of their base"
    assert (reported["short"], reported["late"]) == (False, False)
    assert reported["left"] == 0


MEANWHILE = """
import gc, threading
import gpumem_toolkit as toolkit
from gpumem_toolkit.leaks import live_tensors
from gpumem_client.objects import referrers
started, go_on, came_of = threading.Event(), threading.Event(), []
def batch():
    for number in range(7):
        if number == 5:
            started.set()
            go_on.wait()
        yield torch.empty(64, device="cuda")
def load():
    try:
        came_of.append(len(tuple(batch())))
    except SystemError as error:
        came_of.append(repr(error))
loader = threading.Thread(target=load)
def finish_loading(function):
    def replaced(*arguments):
        go_on.set()
        loader.join()
        return function(*arguments)
    return replaced
if where == "the walk":
    live_tensors._Walker._add = finish_loading(live_tensors._Walker._add)
else:
    for name in "_read", "_resolve":
        setattr(referrers._Search, name, finish_loading(getattr(referrers._Search, name)))
loader.start()
started.wait()
found = toolkit.lingering_tensors()
loader.join()
gc.collect()
result = [came_of, [[group.count, group.referrers] for group in found.groups], torch.cuda.memory_allocated()]
"""


@pytest.mark.parametrize("where", ["the walk", "the search for holders"])
def test_a_walk_does_not_disturb_a_thread_that_fills_a_tuple(start_torch: StartTorch, where: str) -> None:
    came_of, [[count, _]], left = start_torch().exec(MEANWHILE, where=where)
    assert came_of == [7]
    assert count == 5
    assert left == 0


FROZEN = """
import gc
import gpumem_toolkit as toolkit
def run():
    engine = {"weights": [torch.empty(16 << 20, dtype=torch.uint8, device="cuda") for _ in range(2)]}
    gc.collect()
    gc.freeze()
    frozen = gc.get_freeze_count()
    try:
        walked = toolkit.lingering_tensors(max_seconds=30)  # the default ends the search early on a slow machine
        groups = [[group.count, group.bytes >> 20, *group.referrers] for group in walked.groups]
        return groups, walked.hidden_objects > 0, gc.get_freeze_count() > 0.99 * frozen > 0
    finally:
        gc.unfreeze()
result = run()
"""


def test_frozen_tensors_and_what_refers_to_them_are_found_and_stay_frozen(start_torch: StartTorch) -> None:
    [[count, mebibytes, holder]], hidden, stayed = start_torch(PYTORCH_CUDA_ALLOC_CONF=None).exec(FROZEN)
    assert (count, mebibytes, hidden, stayed) == (2, 32, True, True)
    assert re.search(r"\bweights\b.*\bengine\b", holder)
