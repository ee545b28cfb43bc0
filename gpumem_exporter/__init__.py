"""Shows how each byte of GPU memory is used, and which of it can be released.

Importing this package imports nothing else. Each command imports the parts of the exporter that it needs.

Other folders import: `errors`, `logs`, `settings`.
"""

__version__ = "0.3.0"

__all__ = ["__version__"]
