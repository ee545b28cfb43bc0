"""Takes the README's pictures of the live page: the demo in Chromium, light and dark.

    python .readme/take.py [--minutes 10]

Starts the demo on a port of its own and lets it run until the lines of the last ten minutes are full. Needs Chromium on
PATH and the Python package playwright. The picture of the terminal is taken by take_top.py.
"""

from __future__ import annotations

import argparse
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from playwright.sync_api import sync_playwright

HERE = Path(__file__).parent
WIDTH, HEIGHT = 1280, 1080
SETTLE_MS = 15_000
"""For what must last a while before the page calls it a trouble."""


def main() -> int:
    """Take the pictures and say where they are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="to let the demo run (default: %(default)g)")
    minutes = parser.parse_args().minutes
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, "-m", "gpumem_exporter", "serve", "--demo", "--web.listen-address", address]
    demo = subprocess.Popen(command, cwd=HERE.parent)
    try:
        wait_until_ready(f"http://{address}/-/ready", demo)
        time.sleep(60 * minutes)
        for scheme in ("light", "dark"):
            take(f"http://{address}/", scheme, HERE / f"page-{scheme}.png")
    finally:
        demo.terminate()
        demo.wait()
    return 0


def wait_until_ready(url: str, demo: subprocess.Popen[bytes]) -> None:
    """Return once the exporter has polled its devices.

    Raises:
        RuntimeError: it ended, or was not ready in time.
    """
    end = time.monotonic() + 30
    while demo.poll() is None and time.monotonic() < end:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError("the demo does not answer")


def take(url: str, scheme: str, target: Path) -> None:
    """One picture: what is seen of the page without scrolling."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=scheme)  # type: ignore[arg-type]
        page.goto(url)
        page.locator("#events li").first.wait_for(state="attached")
        page.wait_for_timeout(SETTLE_MS)
        page.screenshot(path=target)
        browser.close()
    print(f"{target}: {target.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    sys.exit(main())
