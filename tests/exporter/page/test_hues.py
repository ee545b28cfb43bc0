"""The colors of jobs."""

from __future__ import annotations

from gpumem_exporter.page.hues import HUES, Hues


def test_jobs_have_different_hues_as_long_as_there_are_hues() -> None:
    jobs = [f"job-{number}" for number in range(HUES)]
    assert sorted(Hues().of(jobs).values()) == list(range(HUES))


def test_a_job_keeps_its_hue_while_others_come_and_go_and_after_it_has_ended() -> None:
    hues = Hues()
    first = hues.of(["train", "notebook"])
    crowd = [f"job-{number}" for number in range(40)]
    assert {name: hues.of(["notebook", *crowd])[name] for name in ("notebook",)} == {"notebook": first["notebook"]}
    hues.of(crowd)
    assert {**hues.of(["train", *crowd, "notebook"]), **first} == hues.of(["notebook", *crowd, "train"])
