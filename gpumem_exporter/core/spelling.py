"""The known name that a mistyped one stands for: one rule for the messages of commands, files and the HTTP API."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nlargest
from itertools import islice

# The maximum number of known names that one name is compared with: the HTTP API does it on the event loop.
_MAX_COMPARED = 100
# The number of characters of a name that are compared. The time of a comparison grows with their square.
_MAX_COMPARED_LENGTH = 64
_CANDIDATES = 3
_SIMILAR = 0.6


def did_you_mean(given: str, known: Iterable[str], accepted: str = "") -> str:
    """Return the known name that is most similar to a given one, as a question, and then what is accepted.

    Without a similar name, there is no question.
    """
    from difflib import SequenceMatcher  # slow to import, and only needed for an error

    matcher = SequenceMatcher(b=given[:_MAX_COMPARED_LENGTH].lower())

    def ratio(name: str, *, exact: bool) -> float:
        matcher.set_seq1(name[:_MAX_COMPARED_LENGTH].lower())
        return matcher.ratio() if exact else matcher.quick_ratio()

    # Only the names that share the most characters with the given one are compared exactly. The longest request would
    # otherwise stop the event loop for 40 s.
    candidates = nlargest(_CANDIDATES, islice(known, _MAX_COMPARED), key=lambda name: ratio(name, exact=False))
    similarity, nearest = max(((ratio(name, exact=True), name) for name in candidates), default=(0.0, ""))
    question = f"did you mean {nearest}?" if nearest and similarity >= _SIMILAR else ""
    return f"{question} {accepted}".strip()
