"""`python -m gpumem_exporter` is the command `gpumem-exporter`."""

from __future__ import annotations

import sys

from gpumem_exporter.main import main

if __name__ == "__main__":
    sys.exit(main())
