"""Rejects words that made the project's text hard to read; each has a plainer one."""

from __future__ import annotations

import re
import subprocess

from tests.support.paths import REPOSITORY

PLAINER = {
    r"anew": "again",
    r"mend(s|ed|ing)?": "fix",
    r"whoever|nobody|somebody": "the caller, any client, no client",
    r"reckon\w*": "compute",
    r"troubles?": "error, failure",
    r"has gone": "exited, was removed",
    r"is no more": "exited, was removed",
    r"(is|are|was|were) (told|said)": "reports, shows",
    r"what (is|was) (asked|meant)": "the request, the target",
    r"asked of": "requested",
    r"(gives?|gave|given|giving) (it |them |memory )?back": "release, free",
    r"lets? (\w+ ){0,2}go(?! to| on| up| down)": "release",
    r"but for": "except",
    r"so many": "the number of",
    r"what follows from": "derived from",
    r"figures": "values, samples",
    r"ours|theirs": "the client's, the user code's",
}
"""What to write for the words that each regular expression matches."""
AVOIDED = re.compile("|".join(rf"\b(?:{words})\b" for words in PLAINER), re.IGNORECASE)
EXEMPT = ("LICENSE", "tests/data/", "tests/contract/test_language.py")
"""Texts of others, captured output, and this list."""


def test_no_text_uses_the_words_to_avoid() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    found = []
    for name in filter(None, listed.stdout.split("\0")):
        path = REPOSITORY / name
        if name.startswith(EXEMPT) or not path.is_file():
            continue
        try:
            lines = path.read_text().splitlines()
        except UnicodeDecodeError:  # a picture
            continue
        for number, line in enumerate(lines, 1):
            found += [f"{name}:{number}: {match[0]!r}; write: {_plainer(match[0])}" for match in AVOIDED.finditer(line)]
    assert not found, "\n".join(found)


def _plainer(words: str) -> str:
    return next(plainer for avoided, plainer in PLAINER.items() if re.fullmatch(avoided, words, re.IGNORECASE))
