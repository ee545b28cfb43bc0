from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpumem_toolkit.planning.search import Bisection


@given(st.integers(1, 4096), st.integers(0, 1 << 20), st.integers(0, 1 << 20))
def test_it_finds_the_largest_number_that_fits_in_few_tries(start: int, more: int, largest: int) -> None:
    maximum = start + more
    search = Bisection(start, maximum)
    tried: list[int] = []
    while (number := search.next()) is not None:
        assert 1 <= number <= maximum
        assert number not in tried
        tried.append(number)
        search.record(number, fits=number <= largest)
    assert search.fits == min(largest, maximum)
    assert tried[0] == start
    assert len(tried) <= 2 * max(start, min(largest, maximum), 2).bit_length() + 1
