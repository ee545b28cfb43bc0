"""`GET /runbooks/NAME`: the runbook of an alert, from the package, for a reader without access to the internet."""

from __future__ import annotations

import asyncio
import re
from functools import cache
from html import escape
from itertools import pairwise

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import HTMLResponse

from gpumem_exporter.page.page_routes import content_policy, source_hash, static

INDEX = "README"
# Links between runbooks lead to their pages. Links to other files become plain text: the package lacks them.
_LINK = re.compile(r"\]\((\w+)\.md(#[\w-]+)?\)")
_OTHER_LINK = re.compile(r"\[([^\[\]]*)\]\((?!https:|#|\w+\.md[#)])[^)]*\)")
_ADDRESS = "http://NODE:9844"
_HOST = re.compile(r"(?:[\w.-]{1,255}|\[[0-9a-fA-F:.]{2,45}\])(?::\d{1,5})?")


def runbook_router() -> APIRouter:
    """Return the routes of the runbooks. A link with the name of an alert is in the annotations of the alert."""
    router = APIRouter(include_in_schema=False)

    @router.get("/runbooks/")
    async def index() -> HTMLResponse:
        return _reply(await asyncio.to_thread(_page, INDEX))

    @router.get("/runbooks/{name}")
    async def runbook(request: Request, name: str) -> HTMLResponse:
        if name == INDEX or name not in await asyncio.to_thread(_names):
            raise HTTPException(404)
        page = await asyncio.to_thread(_page, name)
        # The reader's own address of this exporter, so that the commands can be copied.
        host = request.headers.get("host", "")
        if _HOST.fullmatch(host):
            page = page.replace(_ADDRESS, f"{request.url.scheme}://{host}")
        return _reply(page)

    return router


def _reply(page: str) -> HTMLResponse:
    policy = content_policy(style_src=source_hash(static("runbook.css")), img_src="data:")
    return HTMLResponse(page, headers={**policy, "Cache-Control": "no-cache"})


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
    page = static("runbook.html").replace("<!--style-->", static("runbook.css"))
    return page.replace("<!--title-->", escape(title)).replace("<!--body-->", body)
