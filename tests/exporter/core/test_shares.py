"""`Shares`: an owner with at most an equal part of the limit loses nothing, whatever others put."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpumem_exporter.core.shares import Shares

OWNERS = "abcd"
PUTS = st.lists(st.tuples(st.sampled_from(OWNERS), st.integers(1, 9)), max_size=60)


@given(puts=PUTS, limit=st.integers(1, 40), of_owner=st.none() | st.integers(1, 20))
def test_the_owner_with_the_most_loses(puts: list[tuple[str, int]], limit: int, of_owner: int | None) -> None:
    shares = Shares(limit, of_owner=of_owner)
    items: dict[str, list[int]] = {owner: [] for owner in OWNERS}
    for owner, size in puts:
        shares.put(owner, size)
        items[owner].append(size)
        while (loser := shares.over()) is not None:
            sizes = {each: sum(items[each]) for each in OWNERS}
            assert sizes[loser] == max(sizes.values())
            if of_owner is None or sizes[loser] <= of_owner:
                assert sizes[loser] * len([each for each in OWNERS if sizes[each]]) > limit
            if loser != owner:  # of equal owners, the one that put
                assert sizes[loser] > sizes[owner]
            shares.drop(loser, items[loser].pop(0))
        assert {owner: shares[owner] for owner in OWNERS} == {owner: sum(items[owner]) for owner in OWNERS}
        assert shares.total == sum(map(sum, items.values())) <= limit
        assert of_owner is None or max(map(sum, items.values())) <= of_owner
