"""`GET /`: one plain page that says what this is and where to find the rest. It loads nothing from anywhere."""

from __future__ import annotations

import base64
import hashlib
from html import escape

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from gpumem_exporter.server.runtime import Runtime

__all__ = ["landing_router"]

_STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --faint: #57606a; --line: #d0d7de; --ground: #fff; --link: #0550ae;
  --demo: #8a4600; }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --faint: #9da7b3; --line: #30363d; --ground: #0d1117;
  --link: #79b8ff; --demo: #f0b072; } }
body { margin: 0 auto; max-width: 44rem; padding: 1.5rem 1rem; background: var(--ground); color: var(--text);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0; }
p { margin: .25rem 0 1rem; }
.faint { color: var(--faint); }
.demo { border: 2px solid var(--demo); border-radius: .4rem; color: var(--demo); padding: .5rem .75rem; }
dl { margin: 0; border-top: 1px solid var(--line); }
dt { padding-top: .6rem; }
dd { margin: 0; padding-bottom: .6rem; border-bottom: 1px solid var(--line); color: var(--faint); }
a { color: var(--link); }
code { font-family: ui-monospace, monospace; }
"""

_LINKS = (
    ("/health", "How the exporter and the driver are"),
    ("/api/v1/devices", "Devices, with the ledger of each: where every byte of its memory went"),
    ("/api/v1/processes", "Processes, with what each one's allocator holds and could give back"),
    ("/api/v1/actions", "Audit log of actions"),
    ("/api/v1/events", "Events: out-of-memory errors, lost devices, processes that came and went, actions"),
    ("/openapi.json", "Description of the HTTP API"),
)


def landing_router(runtime: Runtime) -> APIRouter:
    """The route of the page."""
    page = _page(runtime)
    digest = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    headers = {
        "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'",
        "Cache-Control": "no-cache",
    }
    router = APIRouter(include_in_schema=False)

    @router.get("/", response_class=HTMLResponse)
    async def landing() -> HTMLResponse:
        return HTMLResponse(page, headers=headers)

    return router


def _page(runtime: Runtime) -> str:
    demo = (
        '<p class="demo" role="note"><strong>This is a demo:</strong> devices and processes are simulated.</p>'
        if runtime.source == "demo"
        else ""
    )
    links = ((runtime.settings.web_telemetry_path, "Metrics, for Prometheus"), *_LINKS)
    entries = "\n".join(
        f'<dt><a href="{escape(path)}"><code>{escape(path)}</code></a></dt><dd>{escape(text)}</dd>'
        for path, text in links
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>gpumem-exporter{" (demo)" if demo else ""}</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
<h1>gpumem-exporter</h1>
<p class="faint">Version {escape(runtime.version)}. Where every byte of GPU memory went, and what can be given back.</p>
{demo}
<dl>
{entries}
</dl>
</main>
</body>
</html>
"""
