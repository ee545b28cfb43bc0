"""What a PromQL expression becomes when one of its conditions is left out.

An expression is read no further than that needs: brackets, texts, the set operators `and`, `or`, `unless`, and
comparisons. The rules' tests show that each condition is there for a reason: leave it out, and a test must fail.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Mutant", "mutants"]

_TOKEN = re.compile(
    r"\"(?:\\.|[^\"\\])*\"|'[^']*'|\{|\}|[()\[\],]|\b(?:and|or|unless|bool)\b|[=!<>]=|[<>]|[^\s\w]|\w+|\s+"
)
_MATCHING = re.compile(r"(?:\s*(?:on|ignoring)\s*\([^)]*\))?(?:\s*group_(?:left|right)\s*\([^)]*\))?")
_SET_OPERATORS = ("and", "or", "unless")
_COMPARISONS = ("==", "!=", "<=", ">=", "<", ">")


@dataclass(frozen=True)
class Mutant:
    """An expression without one of its conditions."""

    left_out: str
    expression: str


@dataclass(frozen=True)
class _Operator:
    text: str
    begin: int
    end: int
    depth: int
    region: tuple[int, int]
    """Where the brackets, or the argument, that it stands in begin and end."""


def mutants(expression: str) -> Iterator[Mutant]:
    """Each operand of a set operator left out (the left one only of `or`), and each comparison's right side."""
    operators = _operators(expression)
    for operator in operators:
        begin, end = operator.region
        alike = [one for one in operators if one.depth == operator.depth and one.region == operator.region]
        later = [one for one in alike if one.begin > operator.begin]
        if operator.text in _SET_OPERATORS:
            binding = ("or",) if operator.text == "or" else _SET_OPERATORS
            stop = next((one.begin for one in later if one.text in binding), end)
            yield _without(expression, operator.begin, stop)
            if operator.text == "or":
                start = max(
                    (one.end for one in alike if one.text == "or" and one.begin < operator.begin), default=begin
                )
                matching = _MATCHING.match(expression, operator.end)
                yield _without(expression, start, matching.end() if matching else operator.end)
        else:
            stop = next((one.begin for one in later if one.text in _SET_OPERATORS), end)
            yield _without(expression, operator.begin, stop)


def _without(expression: str, begin: int, end: int) -> Mutant:
    return Mutant(" ".join(expression[begin:end].split()), f"{expression[:begin]} {expression[end:]}")


def _operators(expression: str) -> list[_Operator]:
    found: list[tuple[str, int, int, int, int]] = []
    regions: list[list[int]] = [[0, len(expression)]]
    open_regions = [0]
    in_selector = False
    tokens = list(_TOKEN.finditer(expression))
    assert "".join(token.group() for token in tokens) == expression
    for place, token in enumerate(tokens):
        text = token.group()
        if text == "{":
            in_selector = True
        elif text == "}":
            in_selector = False
        elif in_selector:
            continue
        elif text in ("(", "["):
            regions.append([token.end(), -1])
            open_regions.append(len(regions) - 1)
        elif text in (")", "]"):
            regions[open_regions.pop()][1] = token.start()
        elif text == ",":
            regions[open_regions.pop()][1] = token.start()
            regions.append([token.end(), -1])
            open_regions.append(len(regions) - 1)
        elif text in _SET_OPERATORS or (text in _COMPARISONS and tokens[place + 1].group() != "bool"):
            found.append((text, token.start(), token.end(), len(open_regions), open_regions[-1]))
    return [
        _Operator(text, begin, end, depth, (regions[region][0], regions[region][1]))
        for text, begin, end, depth, region in found
    ]
