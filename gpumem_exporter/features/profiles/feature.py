"""Memory profiles: received, kept, compared, and shown in each format."""

from __future__ import annotations

from gpumem_exporter.cli.program import EXPLAIN, Listed
from gpumem_exporter.features.feature import Feature, Node, Parts


def _build(node: Node) -> Parts:
    from asyncio import to_thread

    from gpumem_client.wire.protocol import PROFILES_PATH
    from gpumem_exporter.features.profiles.profile_document import MAX_BODY_BYTES
    from gpumem_exporter.features.profiles.profile_intake import ProfileIntake, ScrapedProfiles
    from gpumem_exporter.features.profiles.profile_routes import ProfileAccess, ProfileRoutes, profiles_router
    from gpumem_exporter.features.profiles.profile_store import Profiles

    profiles = Profiles(node.folder, max_bytes=node.settings.storage_max_bytes)
    scraped: ScrapedProfiles = {}
    intake = ProfileIntake(
        profiles,
        scraped,
        node.store,
        node.senders,
        node.dispatcher,
        lambda: node.errors,  # a later feature records the errors, and another one the processes
        snapshot=node.snapshot,
        clock=node.clock,
        wall_clock=node.wall_clock,
        late_process=lambda identity, uid: node.processes.late_process(identity, uid),
        requests_per_minute=node.settings.action_caller_limit,
    )
    access = ProfileAccess(profiles, node.store)
    node.profile_of_error = access.of_error
    node.profiles_of = access.of_job
    routes = ProfileRoutes(access, scraped, node.dispatcher, node.held_requests, node.renderer)
    return Parts(
        routers=[profiles_router(intake, routes)],
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
