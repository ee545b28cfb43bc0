from __future__ import annotations

import random
from itertools import islice

import pytest

from gpumem_exporter.client._leaks import Leak, LeakDetector
from gpumem_exporter.client._lingering import LingeringTensors, TensorGroup
from gpumem_exporter.client._referrers import NOBODY
from gpumem_exporter.client._suspects import growing, numerous, suspicions
from gpumem_exporter.client._trend import Trend, seasonal_slope
from tests.seeded_runs import MIB, SHAPES, allocated, hard_shapes

SEEDS = range(20)


def _found(series: object, steps: int) -> int | None:
    trend = Trend()
    for step, value in enumerate(islice(series, steps)):  # type: ignore[call-overload]
        slope = trend.add(value)
        if slope is not None and slope.sure:
            return step
    return None


@pytest.mark.parametrize("seed", SEEDS)
def test_no_run_without_a_leak_raises_an_alarm(seed: int) -> None:
    for name, shape in {**SHAPES, **hard_shapes()}.items():
        assert _found(allocated(shape, seed), 450) is None, name


@pytest.mark.parametrize("seed", SEEDS)
def test_a_leak_of_one_percent_in_a_thousand_steps_or_more_is_found_within_200_steps(seed: int) -> None:
    rng = random.Random(seed)
    for name, shape in SHAPES.items():
        percent, begin = rng.choice((1.0, 1.0, 1.5, 3.0, 8.0)), rng.choice((0, 0, 137, 400))
        found = _found(allocated(shape, seed, percent=percent, from_step=begin), begin + 200)
        assert found is not None, (name, percent, begin)
        assert found >= begin


def test_a_leak_that_takes_a_bite_every_25_steps_is_found_within_200() -> None:
    shape = SHAPES["every step the same"]
    assert _found(allocated(shape, 1, percent=1.0, from_step=300, every=25), 500) is not None


def test_a_leak_too_slow_for_a_short_window_is_found_in_a_longer_one() -> None:
    shape = SHAPES["batches of many lengths"]
    series = allocated(shape, 3, percent=0.1)
    found = _found(series, 3000)
    assert found is not None
    assert found > 300


def test_the_slope_and_its_bounds_are_those_of_theil_and_sen() -> None:
    rng = random.Random(0)
    points = [int(1000 * at + rng.gauss(0, 5000)) for at in range(40)]
    slope, lower, upper = seasonal_slope(points, 1, 2.0)
    pairs = sorted((points[b] - points[a]) / (b - a) for a in range(40) for b in range(a + 1, 40))
    assert slope == (pairs[len(pairs) // 2 - 1] + pairs[len(pairs) // 2]) / 2
    assert lower < 1000 < upper
    # Kendall's variance for 40 points is 40·39·85/18
    aside = int((len(pairs) - 2 * (40 * 39 * 85 / 18) ** 0.5) // 2)
    assert lower == pairs[aside]


def test_seasons_are_compared_with_themselves() -> None:
    points = [(at % 10) * 1000 + at for at in range(60)]
    assert seasonal_slope(points, 10, 2.0)[0] == 1.0


def _detector(told: list[Leak]) -> LeakDetector:
    return LeakDetector(told.append, name_suspects=False)


def test_a_leak_is_told_once_with_its_rate_and_the_steps_that_are_left() -> None:
    told: list[Leak] = []
    detector = _detector(told)
    for value in islice(allocated(SHAPES["every step the same"], 0, percent=1.0), 400):
        detector.add(1, value, lambda: 1 << 30)
    (leak,) = told
    assert leak.device == 1
    assert leak.bytes_per_step == pytest.approx(8 * (1 << 30) / 100 / 1000, rel=0.01)
    assert leak.steps_left == pytest.approx((1 << 30) / leak.bytes_per_step, abs=1)
    assert detector.leaks == (leak,)
    assert "cuda:1 holds 83.9 KiB more after each step" in str(leak)


def test_what_comes_back_was_no_leak_and_the_next_one_is_told_again() -> None:
    told: list[Leak] = []
    detector = _detector(told)
    for _ in range(2):
        for step in range(250):
            detector.add(0, (1000 + step) * MIB)
        assert detector.leaks
        for _step in range(250):
            detector.add(0, 900 * MIB)
        assert detector.leaks == ()
    assert len(told) == 2


def test_devices_are_told_apart() -> None:
    told: list[Leak] = []
    detector = _detector(told)
    for step in range(200):
        detector.add(0, 100 * MIB)
        detector.add(1, 100 * MIB + step * MIB)
    assert [leak.device for leak in told] == [1]


def test_without_torch_it_looks_at_nothing() -> None:
    told: list[Leak] = []
    detector = _detector(told)
    assert detector.look() == ()
    assert detector.steps == 0


def _group(count: int, shape: tuple[int, ...] = (8, 8), *, graph: bool = False, **more: object) -> TensorGroup:
    return TensorGroup(shape, "float32", 0, count, count * 256, count if graph else 0, **more)  # type: ignore[arg-type]


def test_what_became_more_is_the_suspect_and_what_stayed_is_not() -> None:
    before = LingeringTensors((_group(10), _group(50, (4,))))
    after = LingeringTensors((_group(26, referrers=("list of 26 in history, a global of train",)), _group(50, (4,))))
    (told,) = suspicions(growing(before, after, least=3))
    assert told.startswith("16 more of these: 26 of float32[8x8]")
    assert "list of 26 in history" in told


def test_tensors_that_nobody_holds_point_to_whoever_keeps_their_graph() -> None:
    before = LingeringTensors((_group(10), _group(1, (), graph=True, graph_nodes=30)))
    after = LingeringTensors(
        (
            _group(26, referrers=(NOBODY,)),
            _group(1, (), graph=True, graph_nodes=78, referrers=("local variable total at train.py:3 in train",)),
        )
    )
    first, second = growing(before, after, least=3)
    assert first.group.shape == ()
    assert first.more_nodes == 48
    assert second.group.shape == (8, 8)


def test_a_leak_of_a_new_shape_each_step_is_found_by_its_dimensions() -> None:
    before = LingeringTensors(tuple(_group(1, (length, 4)) for length in range(10)))
    after = LingeringTensors(tuple(_group(1, (length, 4)) for length in range(20)))
    found = growing(before, after, least=3)
    assert found
    assert all(growth.group.shape[0] >= 10 for growth in found)


def test_without_a_walk_to_compare_with_a_model_s_parameters_are_no_suspects() -> None:
    walked = LingeringTensors(
        (
            _group(100, referrers=("dict of 2 in attribute _parameters of a Linear",)),
            _group(100, (3,), referrers=("list of 100 in history, a global of train",)),
        )
    )
    assert [growth.group.shape for growth in numerous(walked, least=50)] == [(3,)]
