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
        return _reply((await asyncio.to_thread(_pages))[INDEX])

    @router.get("/runbooks/{name}")
    async def runbook(request: Request, name: str) -> HTMLResponse:
        pages = await asyncio.to_thread(_pages)
        if name == INDEX or name not in pages:
            raise HTTPException(404)
        # The reader's own address of this exporter, so that the commands can be copied.
        host = request.headers.get("host", "")
        address = f"{request.url.scheme}://{host}" if _HOST.fullmatch(host) else _ADDRESS
        return _reply(pages[name].replace(_ADDRESS, address))

    return router


def _reply(page: str) -> HTMLResponse:
    policy = content_policy(style_src=source_hash(static("runbook.css")), img_src="data:")
    return HTMLResponse(page, headers={**policy, "Cache-Control": "no-cache"})


@cache
def _pages() -> dict[str, str]:
    """Return the runbooks by name as HTML; their list is the page of `INDEX`."""
    from importlib.resources import files

    from markdown_it import MarkdownIt

    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    template = static("runbook.html").replace("<!--style-->", static("runbook.css"))
    folder = files("gpumem_exporter.page").joinpath("runbook_texts")
    texts = {
        file.name.removesuffix(".md"): file.read_text(encoding="utf-8")
        for file in folder.iterdir()
        if file.name.endswith(".md")
    }
    texts[INDEX] += "\n## Runbooks\n\n" + "\n".join(f"- [{name}]({name}.md)" for name in sorted(texts.keys() - {INDEX}))
    pages = {}
    for name, text in texts.items():
        title = text.partition("\n")[0].removeprefix("# ")
        shown = _LINK.sub(
            lambda link: f"]({'./' if link[1] == INDEX else link[1]}{link[2] or ''})", _OTHER_LINK.sub(r"\1", text)
        )
        tokens = markdown.parse(shown)
        for before, token in pairwise(tokens):
            if before.type == "heading_open":
                before.attrSet("id", re.sub(r"[^\w -]", "", token.content.lower()).replace(" ", "-"))
        body = markdown.renderer.render(tokens, markdown.options, {})
        pages[name] = template.replace("<!--title-->", escape(title)).replace("<!--body-->", body)
    return pages
