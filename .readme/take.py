"""Takes the README's pictures of the live page: the demo in Chromium, light and dark.

    python .readme/take.py [--minutes 0.5]

Starts the demo on a free port, and takes the node and its last out-of-memory error. Needs Chromium on PATH and the
Python package playwright. take_top.py takes the picture of the terminal.

The page shows the host's name. To show another one, as root:

    unshare --uts sh -c 'hostname gpu-node-7 && python .readme/take.py'
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

from demo import demo
from playwright.sync_api import sync_playwright

HERE = Path(__file__).parent
WIDTH, HEIGHT, MARGIN = 1440, 900, 16
OOM_GPU = 6
SETTLE_MS = 15_000
"""Some problems must last for a while before the page shows them."""


def main() -> int:
    """Take the pictures and print their paths."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=0.5, help="to let the demo run (default: %(default)g)")
    minutes = parser.parse_args().minutes
    with demo() as url:
        time.sleep(60 * minutes)
        for scheme in ("light", "dark"):
            take(f"{url}/", scheme, HERE / f"page-{scheme}.png", "#jobs")
            take(f"{url}/?gpu={OOM_GPU}&event=oom@", scheme, HERE / f"oom-{scheme}.png", "#detail .oom")
    return 0


def take(url: str, scheme: str, target: Path, last: str) -> None:
    """Take a picture of the page down to the end of an element."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=scheme)  # type: ignore[arg-type]
        page.goto(url)
        page.locator(last).wait_for()
        page.wait_for_timeout(SETTLE_MS)
        end = page.locator(last).bounding_box()
        assert end is not None
        clip = {"x": 0, "y": 0, "width": WIDTH, "height": end["y"] + end["height"] + MARGIN}
        page.screenshot(path=target, full_page=True, clip=clip)  # type: ignore[arg-type]
        browser.close()
    print(f"{target}: {target.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    sys.exit(main())
