"""The report of a GPU: what agrees, what does not, what failed, and how it is written down."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.claims.figures import Claim, Figures, NotHereError, OneNumber, alike, require, shown, true
from tests.claims.place import Place
from tests.claims.table import CLAIMS
from tests.gpu.report import Report
from tests.gpu.report_page import file_name
from tests.support.paths import REPOSITORY

MIB = 1 << 20


class Sides:
    """Two places in which nothing runs, and the report of them."""

    def __init__(self, folder: Path) -> None:
        self.emulated, self.real = Place(folder / "emulated"), Place(folder / "real")
        self.path = folder / "out" / "report.md"

    def claim(self, name: str, emulated: Any, real: Any) -> Claim:
        """A claim that answers so, or raises so, in either place."""

        def measured(place: Place) -> Figures:
            answer = emulated if place is self.emulated else real
            if isinstance(answer, Exception):
                raise answer
            return answer if isinstance(answer, dict) else {"figure": answer}

        return Claim(name, measured)

    def run(self, *claims: Claim) -> tuple[bool, str]:
        """Whether all agree, and the file."""
        report = Report(self.path, "GPU report: model", {"GPU": "model"}, (), len(claims))
        agree = report.run(claims, self.emulated, self.real)
        return agree, self.path.read_text()


@pytest.fixture
def sides(tmp_path: Path) -> Sides:
    return Sides(tmp_path)


def rows(text: str, verdict: str) -> list[str]:
    """The rows of all tables that end with this verdict: yes, NO, not tried, or – where nothing is claimed."""
    return [line for line in text.splitlines() if line.startswith("| ") and line.endswith(f" | {verdict} |")]


@pytest.mark.parametrize(
    ("emulated", "real", "agrees"),
    [
        (alike(5), alike(5), True),
        (alike(None), alike(0), False),
        (alike(10 * MIB, within=2 * MIB), alike(12 * MIB, within=2 * MIB), True),
        (alike(10 * MIB, within=2 * MIB), alike(12 * MIB + 1, within=2 * MIB), False),
        (shown(5), shown(6), True),
        (true(5, 4), true(5, 4), False),
        (true(5, 5), true(6, 6), False),
        (true(5, 5, everywhere=False), true(6, 6, everywhere=False), True),
    ],
)
def test_two_figures_agree_where_each_is_true_and_they_are_as_near_as_they_must_be(
    sides: Sides, emulated: Any, real: Any, agrees: bool
) -> None:
    agree, text = sides.run(sides.claim("a claim", emulated, real))
    assert agree is agrees
    assert len(rows(text, "NO")) == int(not agrees)


def test_disagreements_come_first_with_both_figures_and_what_each_had_to_be(sides: Sides) -> None:
    agree, text = sides.run(
        sides.claim("one", {"freed": alike(7), "other": shown(1)}, {"freed": alike(7), "other": shown(2)}),
        sides.claim("two", {"freed": true(1234567, 1234567)}, {"freed": true(1234567, 1234568)}),
    )
    assert not agree
    (wrong,), (right,), (unclaimed,) = rows(text, "NO"), rows(text, "yes"), rows(text, "–")
    assert re.match(r"\| two \| freed \| 1,234,567 \| .*1,234,568", wrong)
    assert right == "| one | freed | 7 | 7 | yes |"
    assert unclaimed == "| one | other | 1 | 2 | – |"
    assert text.index(wrong) < text.index(right) < text.index(unclaimed)


def test_a_claim_that_raises_is_shown_as_failed_and_costs_no_other(sides: Sides) -> None:
    error = RuntimeError("CUDA error: out of | memory\nCompile with TORCH_USE_CUDA_DSA")
    agree, text = sides.run(
        sides.claim("breaks", {"freed": alike(7)}, error),
        sides.claim("stays", alike(1), alike(1)),
    )
    assert not agree
    (failed,) = rows(text, "NO")
    assert failed.startswith("| breaks |")
    assert "RuntimeError: CUDA error: out of \\| memory" in failed
    assert rows(text, "yes") == ["| stays | figure | 1 | 1 | yes |"]
    assert rows(text, "–") == ["| breaks | freed | 7 | – | – |"]
    assert re.search(r"breaks: real\n\n```text\nTraceback(.|\n)*TORCH_USE_CUDA_DSA\n```", text)


def test_no_devices_uuid_and_no_path_of_this_machine_is_in_a_report(sides: Sides) -> None:
    uuid = "GPU-0123abcd-1111-2222-3333-444455556666"
    error = AssertionError(f"{REPOSITORY}/tests/claims {uuid}")
    report = Report(sides.path, "GPU report", {}, (), 1, [uuid])
    report.run([sides.claim("breaks", alike(1), error)], sides.emulated, sides.real)
    text = sides.path.read_text()
    assert uuid not in text
    assert str(REPOSITORY) not in text
    assert "tests/claims GPU-00000000-0000-0000-0000-000000000000" in text


def test_a_figure_that_one_side_lacks_is_a_disagreement_unless_nothing_is_claimed_of_it(sides: Sides) -> None:
    agree, _ = sides.run(sides.claim("a claim", {"both": alike(1), "one": shown(1)}, {"both": alike(1)}))
    assert agree
    agree, text = sides.run(sides.claim("a claim", {"both": alike(1), "one": alike(1)}, {"both": alike(1)}))
    assert not agree
    assert rows(text, "NO") == ["| a claim | one | 1 | – | NO |"]


def test_what_cannot_be_tried_is_no_disagreement_and_says_why(sides: Sides) -> None:
    agree, text = sides.run(sides.claim("a claim", alike(1), NotHereError("only torch 2.14 and later")))
    assert agree
    (left_out,) = rows(text, "not tried")
    assert left_out.startswith("| a claim |")
    assert "only torch 2.14 and later" in left_out


def test_a_report_that_is_stopped_on_its_way_holds_what_was_measured(sides: Sides) -> None:
    class Stopped(BaseException):
        pass

    def stop(place: Place) -> Figures:
        raise Stopped

    with pytest.raises(Stopped):
        sides.run(sides.claim("first", alike(1), alike(1)), Claim("second", stop))
    text = sides.path.read_text()
    assert rows(text, "yes") == ["| first | figure | 1 | 1 | yes |"]
    assert [path.name for path in sides.path.parent.iterdir()] == ["report.md"]


def test_a_claim_that_wants_the_machine_for_itself_has_it(sides: Sides) -> None:
    happened: list[str] = []

    def resting(name: str) -> Callable[[], None]:
        return lambda: happened.append(name)

    sides.emulated.rest, sides.real.rest = resting("emulated"), resting("real")  # type: ignore[method-assign]
    claim = sides.claim("cost", shown(1), shown(2))
    sides.run(Claim(claim.name, lambda place: (happened.append("measured"), claim.measure(place))[1], alone=True))
    assert happened == ["emulated", "real", "measured"] * 2


def test_a_reports_name_has_model_driver_and_torch_in_it_and_nothing_else() -> None:
    assert file_name("Tesla/../T4 (x)", "", "2.15.0+cu130") == "gpu-report-Tesla-..-T4-x-unknown-2.15.0.md"


def test_words_for_one_number_are_apart_in_the_round_in_which_they_are() -> None:
    number = OneNumber()
    assert number.add({"reserved fell": 5, "action freed": 5}) == 5
    require(number.figures())
    number.add({"reserved fell": 1, "action freed": 2})
    number.add({"reserved fell": 2, "action freed": 1})
    figures = number.figures()
    assert figures["reserved fell"].value == figures["action freed"].value == 8
    with pytest.raises(AssertionError, match=r"action freed\b.*\b2\b.*\b3\b"):
        require(figures)
    nothing = OneNumber()
    nothing.add({"reserved fell": 0, "action freed": 0})
    require(nothing.figures(at_least=0))
    with pytest.raises(AssertionError):
        nothing.figures()


def test_no_two_claims_have_one_name() -> None:
    names = [claim.name for claim in CLAIMS]
    assert len(names) == len(set(names)) > 30
