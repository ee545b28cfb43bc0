from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import islice

import pytest

from gpumem_client.objects.referrers import NO_REFERRER
from gpumem_toolkit.leaks.detector import Leak, LeakDetector
from gpumem_toolkit.leaks.live_tensors import LingeringTensors, TensorGroup
from gpumem_toolkit.leaks.suspects import frequent, grown
from gpumem_toolkit.leaks.trend import Trend
from tests.support.builders.seeded_runs import MIB, SHAPES, allocated, hard_shapes

SEEDS = range(4)  # benchmarks/leaks.py has more of them


def _found(series: Iterable[int], steps: int) -> int | None:
    trend = Trend()
    for step, value in enumerate(islice(series, steps)):
        slope = trend.add(value)
        if slope is not None:
            return step
    return None


@pytest.mark.parametrize("seed", SEEDS)
def test_no_run_without_a_leak_raises_an_alarm(seed: int) -> None:
    for name, shape in {**SHAPES, **hard_shapes()}.items():
        assert _found(allocated(shape, seed), 600) is None, name


@pytest.mark.parametrize("seed", SEEDS)
def test_a_leak_of_one_percent_in_a_thousand_steps_or_more_is_found_within_200_steps(seed: int) -> None:
    rng = random.Random(seed)
    for name, shape in SHAPES.items():
        percent, start = rng.choice((1.0, 1.0, 1.5, 3.0, 8.0)), rng.choice((0, 0, 137, 400))
        found = _found(allocated(shape, seed, percent=percent, from_step=start), start + 200)
        assert found is not None, (name, percent, start)
        assert found >= start


def test_a_rare_leak_is_found_early_and_a_slow_one_in_a_longer_window() -> None:
    rare = allocated(SHAPES["every step the same"], 1, percent=1.0, from_step=300, every=25)
    assert _found(rare, 500) is not None
    found = _found(allocated(SHAPES["batches of many lengths"], 3, percent=0.03), 3000)
    assert found is not None
    assert found > 300


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("garbage collected at irregular times", 550),
        ("garbage of which every fifth collection alone frees all", 2000),
        ("a buffer of the last 20 batches", 1500),
        ("drifting about", 1200),
        ("a cache that fills up to 200 MiB", 450),
    ],
)
def test_a_leak_below_a_hard_pattern_is_found_later(name: str, steps: int) -> None:
    for seed in range(3):
        assert _found(allocated(hard_shapes()[name], seed, percent=1.0), steps) is not None, seed


def test_a_slow_drift_is_seldom_reported() -> None:
    alarms = 0
    for seed in range(40):
        rng = random.Random(seed)
        away, wandering = 0.0, []
        for _ in range(600):
            away = 0.95 * away + rng.gauss(0, 4)
            wandering.append(int((100 + away) * MIB))
        alarms += _found(wandering, 600) is not None
    assert alarms <= 1


def _detector(reported: list[Leak]) -> LeakDetector:
    return LeakDetector(reported.append, name_suspects=False)


def test_a_leak_is_reported_once_with_its_rate_and_the_steps_left() -> None:
    reported: list[Leak] = []
    detector = _detector(reported)
    for value in islice(allocated(SHAPES["every step the same"], 0, percent=1.0), 400):
        detector.add(0, 100 * MIB)
        detector.add(1, value, lambda: (1 << 30, 8 << 30))
    (leak,) = reported
    assert leak.device == 1
    assert leak.bytes_per_step == pytest.approx(8 * (1 << 30) / 100 / 1000, rel=0.01)
    assert leak.steps_left == pytest.approx((1 << 30) / leak.bytes_per_step, abs=1)
    assert detector.leaks == (leak,)
    assert [part for part in ("cuda:1", "83.9 KiB", str(leak.steps_left)) if part not in str(leak)] == []


def test_freed_memory_ends_a_leak_and_the_next_leak_is_reported() -> None:
    reported: list[Leak] = []
    detector = _detector(reported)
    for _ in range(2):
        for step in range(250):
            detector.add(0, (1000 + step) * MIB)
        assert detector.leaks
        for _step in range(600):
            detector.add(0, 900 * MIB)
        assert detector.leaks == ()
    assert len(reported) == 2


def test_a_leak_that_fills_the_device_in_two_hundred_steps_is_reported_before_a_third_of_it() -> None:
    for percent, found in ((0.5, True), (2.0, True), (0.4, False)):
        reported: list[Leak] = []
        detector = _detector(reported)
        for step in range(60):
            used = int((1 + step * percent / 100 * 8) * (1 << 30))
            detector.add(0, used, lambda used=used: ((8 << 30) - used, 8 << 30))  # type: ignore[misc]
        assert bool(reported) is found, percent


def test_a_rise_that_slows_down_or_jumps_once_is_no_fast_leak() -> None:
    slowing = [int((8 << 30) * 0.6 * (1 - 0.95**step)) for step in range(90)]
    jumping = [step * MIB + (step > 45) * (6 << 30) for step in range(90)]
    for values in (slowing, jumping):
        reported: list[Leak] = []
        detector = _detector(reported)
        for value in values:
            detector.add(0, value, lambda: (1 << 30, 8 << 30))
        assert reported == []


def test_growth_is_not_reported_while_no_kind_of_tensor_grows_in_number() -> None:
    reported: list[Leak] = []
    detector = LeakDetector(reported.append)  # there is no CUDA, so no tensor is found
    for step in range(1000):
        detector.add(0, (1000 + step) * MIB)
    assert reported == []
    assert detector.leaks == ()


def test_a_leak_that_has_stopped_is_withdrawn_within_the_window_in_which_it_was_found() -> None:
    for per_step, window in ((MIB, 112), (100 * MIB, 30)):
        detector = _detector([])
        for step in range(180):
            detector.add(0, step * per_step, lambda: (1 << 30, 8 << 30))
        (leak,) = detector.leaks
        assert leak.steps == window
        for _step in range(window * 5 // 4):
            detector.add(0, 180 * per_step, lambda: (1 << 30, 8 << 30))
        assert detector.leaks == ()


def _group(count: int, shape: tuple[int, ...] = (8, 8), *, graph: bool = False, **more: object) -> TensorGroup:
    values = {"bytes": count * 256, "with_graph": count if graph else 0, **more}
    return TensorGroup(shape, "float32", 0, count, **values)  # type: ignore[arg-type]


def test_parameters_of_a_model_are_not_frequent_suspects() -> None:
    walked = LingeringTensors(
        (
            _group(100, referrers=("dict of 2 in attribute _parameters of a Linear",)),
            _group(100, (3,), referrers=("list of 100 in history, a global of train",)),
        )
    )
    (suspect,) = frequent(walked, least=50)
    assert "history" in suspect


def test_suspects_are_the_kinds_that_grew_and_only_otherwise_shapes_together() -> None:
    batch, next_batch = (_group(3, (4, length), graph=True, graph_nodes=9) for length in (77, 512))
    before = LingeringTensors((_group(10), batch))
    after = LingeringTensors((_group(26), next_batch, _group(1, (4096, 4096), bytes=64 << 20)))
    (suspect,) = grown(before, after, least=3)
    assert suspect.startswith("16 more: 26 tensors float32[8x8]")
    lengths = tuple(_group(1, (length, 64)) for length in range(1, 21))
    assert len(grown(before, LingeringTensors((*before.groups, *lengths)), least=16)) == 3
    assert grown(LingeringTensors(lengths[:10]), LingeringTensors(lengths[10:]), least=3) == ()
    assert frequent(LingeringTensors(lengths), least=16) == ()


def test_the_size_of_a_graph_counts_only_beside_tensors_that_only_a_graph_keeps() -> None:
    before = LingeringTensors((_group(10), _group(1, (), graph=True, graph_nodes=10)))
    loss = _group(1, (), graph=True, graph_nodes=50, referrers=("local variable loss in train",))
    kept, in_graph = (_group(26, referrers=(holder,)) for holder in ("a list", NO_REFERRER))
    assert "a list" in grown(before, LingeringTensors((loss, kept)), least=3)[0]
    assert "loss" in grown(before, LingeringTensors((in_graph, loss)), least=3)[0]
