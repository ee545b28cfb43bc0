"""MkDocs' hook: pages that exist elsewhere in the repository, links out of docs/, and the description of the API.

The overview is README.md, the changelog CHANGELOG.md. Links to files outside of docs/, which a reader on a code host
follows in the tree, become links to that host.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
FROM_THE_ROOT = {"index.md": "README.md", "changelog.md": "CHANGELOG.md"}
LINK = re.compile(r"(\]\()(?!https?:|mailto:|#)([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    from mkdocs.structure.files import File

    made = {name: (ROOT / source).read_text(encoding="utf-8") for name, source in FROM_THE_ROOT.items()}
    made["reference/openapi.json"] = openapi_document()
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    for picture in sorted((ROOT / ".readme").glob("*.*")):
        if picture.suffix in {".png", ".svg"}:
            files.append(File.generated(config, f"pictures/{picture.name}", content=picture.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make each relative link of a page one that works on the site."""
    name = page.file.src_uri
    folder = PurePosixPath(FROM_THE_ROOT.get(name, f"docs/{name}")).parent

    def on_the_site(match: re.Match[str]) -> str:
        target = os.path.normpath(folder / match[2])
        if target.startswith(".readme/"):
            return f"{match[1]}{os.path.relpath('pictures/' + PurePosixPath(target).name, PurePosixPath(name).parent)}"
        inside = {source: made for made, source in FROM_THE_ROOT.items()}.get(target, target.removeprefix("docs/"))
        if files.get_file_from_path(inside):
            return f"{match[1]}{os.path.relpath(inside, PurePosixPath(name).parent)}"
        if (ROOT / target).exists():
            kind = "tree" if (ROOT / target).is_dir() else "blob"
            return f"{match[1]}{config.extra['repository']}/{kind}/main/{target}"
        return match[0]  # MkDocs reports it

    return LINK.sub(on_the_site, markdown)


def openapi_document() -> str:
    """Return the document that an exporter serves as /openapi.json."""
    from gpumem_exporter.app import create_app
    from gpumem_exporter.demo import DemoNode
    from gpumem_exporter.runtime import Runtime
    from gpumem_exporter.serve_command import load_settings

    node = DemoNode()
    return json.dumps(create_app(Runtime(load_settings({}, {}), provider=node.provider, host=node.host)).openapi())
