"""`GET /runbooks/NAME`: the runbook of an alert, from the package, for a reader without access to the internet."""

from __future__ import annotations

import asyncio
import re
from functools import cache
from html import escape
from itertools import pairwise

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import HTMLResponse, RedirectResponse

from gpumem_exporter.page.page_routes import content_policy, source_hash

INDEX = "README"
_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 50rem; margin: 1rem auto; padding: 0 1rem; }
pre, code { font-family: ui-monospace, monospace; font-size: 0.9em; }
pre { border: 1px solid #8886; border-radius: 4px; padding: 0.6rem; overflow-x: auto; }
table { border-collapse: collapse; }
th, td { border: 1px solid #8886; padding: 0.3rem 0.6rem; text-align: left; vertical-align: top; }
"""
_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
<nav><a href="../">Live page</a> · <a href="./">All runbooks</a></nav>
<main>
{body}</main>
</html>
"""
_HEADERS = {**content_policy(style_src=source_hash(_STYLE), img_src="data:"), "Cache-Control": "no-cache"}
# Links between runbooks lead to their pages. Links to other files become plain text: the package lacks them.
_LINK = re.compile(r"\]\((\w+)\.md(#[\w-]+)?\)")
_OTHER_LINK = re.compile(r"\[([^\[\]]*)\]\((?!https:|#|\w+\.md[#)])[^)]*\)")
_ADDRESS = "http://NODE:9844"
_HOST = re.compile(r"(?:[\w.-]{1,255}|\[[0-9a-fA-F:.]{2,45}\])(?::\d{1,5})?")


def runbook_router() -> APIRouter:
    """Return the routes of the runbooks. A link with the name of an alert is in the annotations of the alert."""
    router = APIRouter(include_in_schema=False)

    @router.get("/runbooks")
    async def index_without_slash() -> RedirectResponse:
        return RedirectResponse("runbooks/", 308)  # relative, for a path prefix

    @router.get("/runbooks/")
    async def index() -> HTMLResponse:
        return HTMLResponse(await asyncio.to_thread(_page, INDEX), headers=_HEADERS)

    @router.get("/runbooks/{name}")
    async def runbook(request: Request, name: str) -> HTMLResponse:
        if name == INDEX or name not in await asyncio.to_thread(_names):
            raise HTTPException(404)
        page = await asyncio.to_thread(_page, name)
        # The reader's own address of this exporter, so that the commands can be copied.
        host = request.headers.get("host", "")
        if _HOST.fullmatch(host):
            page = page.replace(_ADDRESS, f"{request.url.scheme}://{host}")
        return HTMLResponse(page, headers=_HEADERS)

    return router


@cache
def _names() -> tuple[str, ...]:
    from importlib.resources import files

    folder = files("gpumem_exporter.page").joinpath("runbook_texts")
    return tuple(sorted(entry.name.removesuffix(".md") for entry in folder.iterdir() if entry.name.endswith(".md")))


@cache
def _page(name: str) -> str:
    """Return a runbook as HTML. The first one loads the parser."""
    from importlib.resources import files

    from markdown_it import MarkdownIt

    source = files("gpumem_exporter.page").joinpath("runbook_texts", f"{name}.md")
    text = source.read_text(encoding="utf-8")
    if name == INDEX:
        text += "\n## Runbooks\n\n" + "\n".join(f"- [{each}]({each}.md)" for each in _names() if each != INDEX) + "\n"
    title = text.partition("\n")[0].removeprefix("# ")
    text = _OTHER_LINK.sub(r"\1", text)
    text = _LINK.sub(lambda link: f"]({'./' if link[1] == INDEX else link[1]}{link[2] or ''})", text)
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = markdown.parse(text)
    for before, token in pairwise(tokens):
        if before.type == "heading_open":
            before.attrSet("id", re.sub(r"[^\w -]", "", token.content.lower()).replace(" ", "-"))
    body = markdown.renderer.render(tokens, markdown.options, {})
    return _PAGE.format(title=escape(title), style=_STYLE, body=body)
