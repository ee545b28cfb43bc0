"""Where every byte of GPU memory went, and what of it can be given back.

Importing this package costs nothing and pulls in nothing: the exporter's parts are imported by the command that needs
them, and `gpumem_exporter.client`, the part that runs inside training processes, needs the standard library alone.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
