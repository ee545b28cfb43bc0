"""A profile, or the difference of two, as a file: JSON, pprof, or a page."""

from __future__ import annotations

from collections.abc import Mapping

from gpumem_exporter.features.profiles import pprof, profile_json, profile_page
from gpumem_exporter.features.profiles.profile_diff import Difference
from gpumem_exporter.features.profiles.profile_lines import Moment
from gpumem_exporter.features.profiles.stored_profile import Format, StoredProfile

SUFFIXES: Mapping[Format, str] = {"html": "html", "pprof": "pb.gz", "json": "json"}
"""The end of the name of a file in each format."""


def render(profile: StoredProfile | Difference, form: Format, moment: Moment = "live") -> tuple[bytes, str]:
    """Return a profile or a difference as a file, and its media type.

    `moment` is for a profile; a difference has its own, and a page has both. May take a second: call it in a thread.
    Raises NoPeakError for the highest moment of a profile that was taken without a recording.
    """
    if form == "html":
        return profile_page.render(profile), "text/html; charset=utf-8"
    lines = profile.lines if isinstance(profile, Difference) else profile.lines(moment)
    changed = sorted((line for line in lines if line.change_bytes), key=lambda line: -abs(line.change_bytes))
    if form == "pprof":
        return pprof.encode(profile, changed), "application/octet-stream"
    return profile_json.render(profile, changed, moment), "application/json"
