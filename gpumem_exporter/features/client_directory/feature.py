"""`--client.directory`: jobs without the package import the client from a folder of the node."""

from __future__ import annotations

from pathlib import Path

from gpumem_exporter.features.feature import Feature, Node, Parts


def _build(node: Node) -> Parts:
    from gpumem_exporter.features.client_directory.client_directory_settings import ClientDirectorySettings

    folder = node.settings.of(ClientDirectorySettings).client_directory
    if folder:
        from gpumem_exporter.features.client_directory.client_directory import put_client

        put_client(Path(folder))
    node.facts["client_directory"] = folder
    return Parts()


FEATURE = Feature(build=_build, settings="ClientDirectorySettings")
