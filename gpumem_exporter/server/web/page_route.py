"""`GET /`: the live page."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from gpumem_exporter.server.http.negotiation import accepts_gzip
from gpumem_exporter.server.web.page import Page

__all__ = ["page_router"]


def page_router(page: Page) -> APIRouter:
    """The route of the page."""
    router = APIRouter(include_in_schema=False)

    @router.get("/", response_class=Response)
    async def show(request: Request) -> Response:
        if request.headers.get("if-none-match") == page.headers["ETag"]:
            return Response(status_code=304, headers=page.headers)
        if accepts_gzip(request.headers.get("accept-encoding", "")):
            headers = {**page.headers, "Content-Encoding": "gzip"}
            return Response(page.compressed, headers=headers, media_type="text/html")
        return Response(page.body, headers=page.headers, media_type="text/html")

    return router
