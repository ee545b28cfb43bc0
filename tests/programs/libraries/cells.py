"""Runs the cells of its arguments in a Jupyter kernel, as a notebook's server does, and prints what each cell shows."""

from __future__ import annotations

import json
import sys
from typing import Any

from jupyter_client.manager import start_new_kernel


def main() -> None:
    manager, client = start_new_kernel()
    try:
        for cell in sys.argv[1:]:
            shown: list[str] = []

            def show(message: dict[str, Any], shown: list[str] = shown) -> None:
                content = message["content"]
                shown.append(content.get("text") or content.get("data", {}).get("text/plain", ""))

            reply = client.execute_interactive(cell, output_hook=show)["content"]
            print(*reply.get("traceback", ()), sep="\n", file=sys.stderr)
            print(json.dumps({"status": reply["status"], "error": reply.get("ename"), "shown": "\n".join(shown)}))
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


if __name__ == "__main__":
    main()
