"""Draws the dashboards' queries from a real Prometheus: `python grafana/preview.py --prometheus URL --out DIR`.

Writes a page for each dashboard and, if Chromium is installed, a screenshot. The pages show the results of the queries,
so that a change can be checked without Grafana; they do not look like Grafana. Uses the standard library only.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

from gpumem_dashboards.queries import Prometheus, PrometheusError, Scope, resolve
from gpumem_dashboards.rendering import PAGE_WIDTH, loads, render

DASHBOARDS = Path(__file__).with_name("dashboards")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def main() -> int:
    """Run the command and return its exit status."""
    options = _parse()
    options.out.mkdir(parents=True, exist_ok=True)
    prometheus = Prometheus(options.prometheus)
    end = options.end or time.time()
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    for name in options.dashboard:
        dashboard = loads(DASHBOARDS / f"{name}.json")
        scope = Scope(end, options.seconds, options.scrape_interval, variables=dict(options.var))
        scope = Scope(end, options.seconds, options.scrape_interval, variables=resolve(dashboard, prometheus, scope))
        page, height = render(dashboard, prometheus, scope)
        written = options.out / f"{name}.html"
        written.write_text(page, encoding="utf-8")
        sys.stdout.write(f"{written}\n")
        if browser is not None:
            sys.stdout.write(f"{_screenshot(browser, written, height)}\n")
    if browser is None:
        sys.stderr.write(f"no screenshots: none of {', '.join(BROWSERS)} is installed\n")
    return 0


def _parse() -> argparse.Namespace:
    known = sorted(path.stem for path in DASHBOARDS.glob("*.json"))
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prometheus", required=True, metavar="URL", help="such as http://localhost:9090")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="where the pages go")
    parser.add_argument("--dashboard", action="append", choices=known, help="which; all by default, repeatable")
    parser.add_argument("--seconds", type=int, default=3600, help="how long a time is shown (default 3600)")
    parser.add_argument("--end", type=float, metavar="UNIX", help="its end, in unix seconds (default now)")
    parser.add_argument(
        "--scrape-interval", type=float, default=15.0, metavar="SECONDS", help="Prometheus' (default 15)"
    )
    parser.add_argument(
        "--var", action="append", default=[], metavar="NAME=VALUE", type=_pair, help="a variable's value, repeatable"
    )
    options = parser.parse_args()
    options.dashboard = options.dashboard or known
    return options


def _pair(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign:
        raise argparse.ArgumentTypeError(f"not NAME=VALUE: {text}")
    return name, value


def _screenshot(browser: str, page: Path, height: int) -> Path:
    picture = page.with_suffix(".png")
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")
    subprocess.run(  # noqa: S603 - the browser that was found, on a page that was just written
        [browser, *flags, f"--window-size={PAGE_WIDTH},{height}", f"--screenshot={picture}", page.absolute().as_uri()],
        check=True,
        capture_output=True,
        timeout=120,
    )
    return picture


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PrometheusError as error:
        sys.exit(f"preview: {error}")
