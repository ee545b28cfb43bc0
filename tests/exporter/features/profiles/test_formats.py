from __future__ import annotations

import json
from typing import Any

import pytest

from gpumem_client.profile.profile_types import Owner
from gpumem_exporter.errors import NoPeakError
from gpumem_exporter.features.profiles import pprof, profile_formats
from gpumem_exporter.features.profiles.profile_diff import difference
from gpumem_exporter.features.profiles.profile_lines import Format, Moment
from gpumem_exporter.features.profiles.stored_profile import StoredProfile
from tests.support.builders.builders import MIB, UUIDS
from tests.support.builders.profile_documents import (
    CALL,
    FORWARD,
    LINEAR,
    MAIN,
    SCRIPT,
    STEP,
    made_up,
    many_stacks,
    stored,
    training,
)
from tests.support.truth.pprof_reader import read_pprof

WEIGHT = Owner("parameters", "model.layers.0.weight", "4x4", "float32")
STATE = Owner("optimizer_state", "Adam.exp_avg model.layers.0.weight")
KEPT = Owner("tensors", "list of 300 in outputs, a global of __main__")
SMALL = stored(
    made_up(
        [
            (0, (), WEIGHT, 10 * MIB, 10 * MIB),
            (0, (), STATE, 20 * MIB, 20 * MIB),
            (0, (LINEAR, CALL, FORWARD, STEP, MAIN), KEPT, 30 * MIB, 30 * MIB),
            (1, (LINEAR, FORWARD, MAIN), None, 0, 40 * MIB),
            (1, (), None, 5 * MIB, 5 * MIB),
        ],
        notes=("objects that were frozen are not named",),
    )
)


def rendered(profile: StoredProfile, form: Format, moment: Moment = "live") -> bytes:
    return profile_formats.render(profile.shown(form, moment), form)[0]


def documents_of_page(profile: StoredProfile) -> Any:
    """Return the JSON documents in a page."""
    page = rendered(profile, "html")
    return json.loads(page.partition(b'type="application/json">')[2].partition(b"</script>")[0])["documents"]


def test_pprof_has_all_bytes_with_functions_lines_and_labels() -> None:
    profile = read_pprof(rendered(SMALL, "pprof"))
    assert profile.types == (("inuse_objects", "count"), ("inuse_space", "bytes"))
    assert profile.default_type == "inuse_space"
    assert profile.time_nanos == SMALL.facts.time_unix_seconds * 1e9
    assert profile.duration_nanos == 30 * 10**9
    assert profile.comments == SMALL.profile.notes
    assert sum(sample.values["inuse_space"] for sample in profile.samples) == 65 * MIB
    kept = next(sample for sample in profile.samples if sample.values["inuse_space"] == 30 * MIB)
    assert kept.frames == tuple(map(tuple, (LINEAR, CALL, FORWARD, STEP, MAIN)))
    assert kept.labels == {"device": "GPU 0", "pool": "default", "owner": f"other tensors {KEPT.name}"}
    assert kept.values["inuse_objects"] == 1


def test_an_owner_without_a_stack_is_a_stack_of_its_module_path() -> None:
    samples = {sample.values["inuse_space"]: sample for sample in read_pprof(rendered(SMALL, "pprof")).samples}
    peak = read_pprof(rendered(SMALL, "pprof", "peak")).samples
    assert sum(sample.values["inuse_space"] for sample in peak) == 105 * MIB
    names = [[function for function, _, _ in samples[size * MIB].frames] for size in (10, 20, 5)]
    path = ["model.layers.0.weight", "model.layers.0", "model.layers", "model"]
    assert names == [[*path, "parameters"], [*path, "Adam.exp_avg", "optimizer state"], ["no visible owner"]]


def test_a_profile_without_a_recording_has_no_highest_moment() -> None:
    without = stored(made_up([(0, (), WEIGHT, MIB, None)], recorded=False))
    with pytest.raises(NoPeakError):
        rendered(without, "json", "peak")
    assert [each["moment"] for each in documents_of_page(without)] == ["live"]
    assert [each["moment"] for each in documents_of_page(SMALL)] == ["live", "peak"]


def test_json_has_names_and_the_largest_first() -> None:
    document = json.loads(rendered(SMALL, "json"))
    assert document["devices"][0] == {
        "gpu": "0",
        "uuid": UUIDS[0],
        "allocated_bytes": 60 * MIB,
        "peak_bytes": 60 * MIB,
        "reserved_bytes": 124 * MIB,
        "fragmented_bytes": 16 * MIB,
        "segments": 12,
    }
    first = document["rows"][0]
    assert first["stack"][-1] == f"main ({SCRIPT}:40)"
    place = {"owner": KEPT.name, "line": "model.py:12 in forward", "called_from": None, "uuid": UUIDS[0]}
    assert first.items() >= {**place, "kind": "tensors", "bytes": 30 * MIB, "blocks": 1, "pool": "default"}.items()
    sizes = {"tensors": 30 * MIB, "optimizer_state": 20 * MIB, "parameters": 10 * MIB, "unseen": 5 * MIB}
    assert [row["bytes"] for row in document["rows"]] == list(sizes.values())
    assert {each["kind"]: each["bytes"] for each in document["kinds"]} == sizes
    assert document["lines"][0]["line"] == "model.py:12 in forward"


def test_a_page_of_a_difference_lists_the_largest_groups_of_each_view() -> None:
    """What grew the most hides neither what shrank a little nor what has not changed."""
    sizes = {f"grows_{chr(97 + i // 26)}{chr(97 + i % 26)}": (10 * MIB, 20 * MIB) for i in range(120)}
    sizes |= {"shrinks": (2 * MIB, MIB), "stays": (500 * MIB, 500 * MIB)}
    before, after = (
        stored(made_up([(0, (), Owner("tensors", name), each[i], None) for name, each in sizes.items()])).at("live")
        for i in (0, 1)
    )
    change = difference(before, after)
    page = profile_formats.render([change], "html")[0]
    (document,) = json.loads(page.partition(b'type="application/json">')[2].partition(b"</script>")[0])["documents"]
    listed = {row["owner"]: row["change_bytes"] for row in document["owners"]}
    assert (listed["shrinks"], listed["stays"]) == (-MIB, 0)
    assert document["all_owners"] == [
        {"count": 120, "bytes": 1200 * MIB},
        {"count": 1, "bytes": MIB},
        {"count": 122, "bytes": 2901 * MIB},
    ]
    assert len(json.loads(profile_formats.render([change], "json")[0])["owners"]) == 100


def test_a_long_profile_keeps_its_sum_and_merges_its_smallest_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = stored(many_stacks(stacks=200))
    total = sum(device.allocated_bytes for device in profile.profile.devices)
    monkeypatch.setattr(profile_formats, "MAX_LENGTH", 50_000)
    monkeypatch.setattr(pprof, "_MAX_LENGTH", 5_000)
    rows = json.loads(rendered(profile, "json"))["rows"]
    assert rows[-1]["kind"] == "merged"
    shown = documents_of_page(profile)[0]["rows"]
    assert shown[-1]["kind"] == "merged"
    assert len(shown) > 4 * len(rows), "the rows of a page share their frames"
    assert sum(row["bytes"] for row in shown) == total
    samples = read_pprof(rendered(profile, "pprof")).samples
    assert samples[-1].labels["owner"] == "many small blocks"
    for sizes in ([row["bytes"] for row in rows], [sample.values["inuse_space"] for sample in samples]):
        assert len(sizes) < 200
        assert sum(sizes) == total


def test_a_difference_has_signed_values_in_every_format() -> None:
    before, after = stored(training(leaked=300)).at("live"), stored(training(leaked=100, layers=12)).at("live")
    change = difference(before, after)
    (sample,) = read_pprof(profile_formats.render([change], "pprof")[0]).samples
    (row,) = json.loads(profile_formats.render([change], "json")[0])["rows"]
    assert sample.values["inuse_space"] == row["change_bytes"] == -200 * MIB
    assert (row["before_bytes"], row["after_bytes"]) == (300 * MIB, 100 * MIB)


def test_a_table_of_long_texts_is_short() -> None:
    owners = [Owner("tensors", f"{i} {'x' * 4000}") for i in range(900)]
    profile = stored(made_up([(0, (), owner, MIB, MIB) for owner in owners]))
    document = json.loads(rendered(profile, "json"))
    more = document["more_owners"]
    assert len(document["owners"]) + more["count"] == 900
    assert len(document["owners"]) * MIB + more["bytes"] == 900 * MIB
