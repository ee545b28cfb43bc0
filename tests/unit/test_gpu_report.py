"""The report of a GPU: what agrees, what does not, what failed, and how it is written down."""

from __future__ import annotations

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


def section(text: str, heading: str) -> list[str]:
    """The rows of a section's table."""
    _, _, after = text.partition(f"## {heading}\n")
    lines = [line for line in after.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    return [line for line in lines if not line.startswith(("| claim |", "| --- |"))]


@pytest.mark.parametrize(
    ("emulated", "real", "agrees"),
    [
        (alike(5), alike(5), True),
        (alike(5), alike(6), False),
        (alike("classic"), alike("expandable"), False),
        (alike(None), alike(0), False),
        (alike(True), alike(True), True),
        (alike(10 * MIB, within=2 * MIB), alike(12 * MIB, within=2 * MIB), True),
        (alike(10 * MIB, within=2 * MIB), alike(12 * MIB + 1, within=2 * MIB), False),
        (alike(None, within=2), alike(1, within=2), False),
        (shown(5), shown(6), True),
        (true(5, 5), true(6, 6), False),
        (true(5, 5, everywhere=False), true(6, 6, everywhere=False), True),
        (true(5, 4), true(5, 4), False),
        (true(None, 4), true(4, 4), False),
        (true(None, None), true(None, None), True),
    ],
)
def test_two_figures_agree_where_each_is_true_and_they_are_as_near_as_they_must_be(
    sides: Sides, emulated: Any, real: Any, agrees: bool
) -> None:
    agree, text = sides.run(sides.claim("a claim", emulated, real))
    assert agree is agrees
    assert len(section(text, "Disagreements")) == int(not agrees)


def test_disagreements_come_first_with_both_figures_and_what_each_had_to_be(sides: Sides) -> None:
    agree, text = sides.run(
        sides.claim("one", {"freed": alike(7), "other": shown(1)}, {"freed": alike(7), "other": shown(2)}),
        sides.claim("two", {"freed": true(1234567, 1234567)}, {"freed": true(1234567, 1234568)}),
    )
    assert not agree
    assert section(text, "Disagreements") == ["| two | freed | 1,234,567 | 1,234,567 instead of 1,234,568 | NO |"]
    assert section(text, "What agrees") == ["| one | freed | 7 | 7 | yes |"]
    assert section(text, "Figures of which nothing is claimed") == ["| one | other | 1 | 2 | – |"]
    assert "| claims | 2 measured of 2; 1 disagree |" in text


def test_figures_of_a_claim_that_are_one_number_are_one_row(sides: Sides) -> None:
    figures = {"reclaimable": true(9, 9), "freed": true(9, 9), "left": true(0, 0)}
    _, text = sides.run(sides.claim("a claim", figures, figures))
    assert section(text, "What agrees") == [
        "| a claim | reclaimable = freed | 9 | 9 | yes |",
        "|  | left | 0 | 0 | yes |",
    ]


def test_a_claim_that_raises_is_shown_as_failed_and_costs_no_other(sides: Sides) -> None:
    error = RuntimeError("CUDA error: out of | memory\nCompile with TORCH_USE_CUDA_DSA")
    agree, text = sides.run(
        sides.claim("breaks", {"freed": alike(7)}, error),
        sides.claim("stays", alike(1), alike(1)),
    )
    assert not agree
    assert section(text, "Disagreements") == [
        "| breaks | the claim itself | – | failed: RuntimeError: CUDA error: out of \\| memory | NO |"
    ]
    assert section(text, "What agrees") == ["| stays | figure | 1 | 1 | yes |"]
    assert section(text, "Figures of which nothing is claimed") == ["| breaks | freed | 7 | – | – |"]
    assert "### breaks: real\n\n```text\nTraceback" in text
    assert "Compile with TORCH_USE_CUDA_DSA\n```" in text


def test_no_devices_uuid_and_no_path_of_this_machine_is_in_a_report(sides: Sides) -> None:
    uuid = "GPU-0123abcd-1111-2222-3333-444455556666"
    error = AssertionError(f"{REPOSITORY}/tests/claims: gpumem_ledger_bytes of {uuid}")
    report = Report(sides.path, "GPU report", {}, (), 1, [uuid])
    report.run([sides.claim("breaks", alike(1), error)], sides.emulated, sides.real)
    text = sides.path.read_text()
    assert uuid not in text
    assert str(REPOSITORY) not in text
    assert "tests/claims: gpumem_ledger_bytes of GPU-00000000-0000-0000-0000-000000000000" in text


def test_what_a_failed_claim_left_running_is_ended_before_the_next(sides: Sides) -> None:
    rested: list[Place] = []
    sides.real.rest = lambda: rested.append(sides.real)  # type: ignore[method-assign]
    sides.run(sides.claim("breaks", alike(1), AssertionError("no")), sides.claim("stays", alike(1), alike(1)))
    assert rested == [sides.real]


def test_a_figure_that_one_side_lacks_is_a_disagreement_unless_nothing_is_claimed_of_it(sides: Sides) -> None:
    agree, _ = sides.run(sides.claim("a claim", {"both": alike(1), "one": shown(1)}, {"both": alike(1)}))
    assert agree
    agree, text = sides.run(sides.claim("a claim", {"both": alike(1), "one": alike(1)}, {"both": alike(1)}))
    assert not agree
    assert section(text, "Disagreements") == ["| a claim | one | 1 | – | NO |"]


def test_with_one_column_a_figure_agrees_only_where_somebody_here_knows_it(sides: Sides) -> None:
    claim = sides.claim("a claim", {"known": true(1, 1), "compared": alike(2)}, None)
    for emulated, real in ((sides.emulated, None), (None, sides.emulated)):
        report = Report(None, "GPU report", {}, (), 1)
        assert report.run([claim], emulated, real)
        columns = "1 | –" if real is None else "– | 1"
        assert section(report.text, "What agrees") == [f"| a claim | known | {columns} | yes |"]
        assert len(section(report.text, "Figures of which nothing is claimed")) == 1


def test_what_cannot_be_tried_is_no_disagreement_and_says_why(sides: Sides) -> None:
    agree, text = sides.run(sides.claim("a claim", alike(1), NotHereError("only torch 2.14 and later")))
    assert agree
    assert section(text, "What could not be tried") == [
        "| a claim | the claim itself | – | only torch 2.14 and later | not tried |"
    ]


def test_a_report_that_is_stopped_on_its_way_holds_what_was_measured(sides: Sides) -> None:
    class Stopped(BaseException):
        pass

    def stop(place: Place) -> Figures:
        raise Stopped

    with pytest.raises(Stopped):
        sides.run(sides.claim("first", alike(1), alike(1)), Claim("second", stop))
    text = sides.path.read_text()
    assert section(text, "What agrees") == ["| first | figure | 1 | 1 | yes |"]
    assert "| claims | 1 measured of 2; 0 disagree |" in text
    assert [path.name for path in sides.path.parent.iterdir()] == ["report.md"]


def test_a_claim_that_wants_the_machine_for_itself_has_it(sides: Sides) -> None:
    happened: list[str] = []

    def resting(name: str) -> Callable[[], None]:
        return lambda: happened.append(name)

    sides.emulated.rest, sides.real.rest = resting("emulated"), resting("real")  # type: ignore[method-assign]
    claim = sides.claim("cost", shown(1), shown(2))
    sides.run(Claim(claim.name, lambda place: (happened.append("measured"), claim.measure(place))[1], alone=True))
    assert happened == ["emulated", "real", "measured"] * 2


@pytest.mark.parametrize(
    ("model", "driver", "torch", "name"),
    [
        (
            "NVIDIA H100 80GB HBM3",
            "570.124",
            "2.11.0+cu130",
            "gpu-report-NVIDIA-H100-80GB-HBM3-570.124-2.11.0.md",
        ),
        ("Tesla/../T4 (x)", "580.159.04", "2.15.0", "gpu-report-Tesla-..-T4-x-580.159.04-2.15.0.md"),
        ("…", "", "2.15.0a0+git1", "gpu-report-unknown-unknown-2.15.0a0.md"),
    ],
)
def test_a_reports_name_has_model_driver_and_torch_in_it_and_nothing_else(
    model: str, driver: str, torch: str, name: str
) -> None:
    assert file_name(model, driver, torch) == name


def test_words_for_one_number_are_apart_in_the_round_in_which_they_are() -> None:
    number = OneNumber()
    assert number.add({"reserved fell": 5, "action freed": 5}) == 5
    require(number.figures())
    number.add({"reserved fell": 1, "action freed": 2})
    number.add({"reserved fell": 2, "action freed": 1})
    figures = number.figures()
    assert figures["reserved fell"].value == figures["action freed"].value == 8
    with pytest.raises(AssertionError, match="action freed in round 2: 2, not 1; action freed in round 3: 1, not 2"):
        require(figures)


def test_words_that_were_nothing_all_along_are_no_proof() -> None:
    number = OneNumber()
    number.add({"reserved fell": 0, "action freed": 0})
    require(number.figures(at_least=0))
    with pytest.raises(AssertionError, match="above zero in 0 of 1 rounds"):
        require(number.figures())


def test_no_two_claims_have_one_name() -> None:
    names = [claim.name for claim in CLAIMS]
    assert len(names) == len(set(names)) > 30
