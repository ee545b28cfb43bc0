"""Memory profiles: received, kept, compared, and shown in each format."""

from __future__ import annotations

from gpumem_exporter.cli.program import EXPLAIN, Listed
from gpumem_exporter.features.feature import Feature, Node, Parts


def _build(node: Node) -> Parts:
    from asyncio import to_thread

    from gpumem_client.wire.protocol import PROFILES_PATH
    from gpumem_exporter.features.profiles.profile_document import MAX_BODY_BYTES
    from gpumem_exporter.features.profiles.profile_intake import ProfileIntake
    from gpumem_exporter.features.profiles.profile_routes import ProfileAccess, ProfileRoutes
    from gpumem_exporter.features.profiles.profile_store import Profiles

    profiles = Profiles(node.folder, max_bytes=node.settings.storage_max_bytes)
    intake = ProfileIntake(profiles, node)
    access = ProfileAccess(profiles, node.store)
    node.profile_of_error, node.profiles_of = access.of_error, access.of_job
    return Parts(
        routers=[ProfileRoutes(access, intake, node).router()],
        body_limits={PROFILES_PATH: MAX_BODY_BYTES},
        chores={"delete_unconfirmed_profiles": intake.expire},
        tasks=[lambda: to_thread(profiles.load)],
    )


FEATURE = Feature(
    build=_build,
    commands={
        "profile": Listed(EXPLAIN, "Show which lines and objects hold the memory of a process.", "profile_command")
    },
)
