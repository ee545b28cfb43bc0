"""`--client.directory`: jobs without the package import the client from a folder of the node.

A finding counts the processes that do not report, and shows how jobs on this node get the client.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from gpumem_exporter.features.feature import Feature, Node, Parts


def _build(node: Node) -> Parts:
    from gpumem_exporter.features.client_directory.client_directory_settings import ClientDirectorySettings
    from gpumem_exporter.features.client_directory.unreported import unreported

    folder = node.settings.of(ClientDirectorySettings).client_directory
    if folder:
        from gpumem_exporter.features.client_directory.client_directory import put_client

        put_client(Path(folder))
    node.facts["client_directory"] = folder
    return Parts(findings=[partial(unreported, client_directory=folder)])


FEATURE = Feature(build=_build, settings="ClientDirectorySettings")
