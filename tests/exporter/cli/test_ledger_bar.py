from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpumem_exporter.cli.render.ledger_bar import SEGMENTS, bar_lengths, segments_of
from gpumem_exporter.core.ledger import CATEGORIES

_SIZES = st.integers(min_value=-(1 << 40), max_value=1 << 50)


def test_every_category_is_in_exactly_one_segment() -> None:
    assert sorted(category for segment in SEGMENTS for category in segment.categories) == sorted(CATEGORIES)


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(CATEGORIES, _SIZES)), st.integers(1, 80))
def test_the_bar_is_filled_and_each_segment_is_within_one_character_of_its_share(
    ledger: dict[str, int], width: int
) -> None:
    sizes = [max(0, sum(ledger.get(name, 0) for name in segment.categories)) for segment in SEGMENTS]
    lengths = bar_lengths(ledger, width)
    if sum(sizes) == 0:
        assert lengths == (0,) * len(SEGMENTS)
        return
    assert sum(lengths) == width
    for size, length in zip(sizes, lengths, strict=True):
        assert abs(length - size * width / sum(sizes)) < 1


def test_a_cache_of_which_nothing_is_known_is_not_called_fragmented() -> None:
    unknown, known = {"torch_fragmented": 5}, {"torch_fragmented": 5, "torch_reclaimable": 0}
    names = [segment.name for segment in segments_of([unknown, {"free": 1}])]
    assert "fragmented" not in names
    assert "cache, may be released" in names
    assert segments_of([unknown, known]) == segments_of([known]) == segments_of([]) == SEGMENTS


def test_a_negative_segment_has_no_characters() -> None:
    assert bar_lengths({"torch_allocated": 50, "unattributed": -3, "free": 50}, 10) == (5, 0, 0, 0, 5)
