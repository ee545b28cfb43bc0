"""Waits for torch, in every Python process that has this folder in its PYTHONPATH; then `injection.py` runs.

`gpumem-run` sets PYTHONPATH to this folder, and a platform sets it to the folder of the exporter's
`--client.directory`, where this file is a link to the current version. It imports the `sitecustomize` that it hides.
"""

# Any interpreter may run this file, so it compiles in Python 2, too. It is short, because a job that may not write
# bytecode compiles it in each process, and imports nothing that an interpreter has not loaded.

import os
import sys


class _TorchFinder:
    """Finds nothing, and waits until torch is imported."""

    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            # A new list, because another thread may be searching in this one.
            sys.meta_path = [finder for finder in sys.meta_path if finder is not self]
            _inject()


def _inject():
    try:
        # A later upgrade replaces the link, but not the folder of this version.
        path = os.path.realpath(__file__).rsplit("/", 1)[0] + "/injection.py"
        with open(path, "rb") as file:
            code = compile(file.read(), path, "exec")
        exec(code, {"__file__": path, "__name__": "_gpumem_injection"})
    except Exception:  # noqa: BLE001, S110 - the program must run in any case
        pass


def _chain(directory):
    """Import the `sitecustomize` that would have been found without this directory."""
    # A .pth file may have put an entry there that is not a string; imports skip it.
    sys.path[:] = [entry for entry in sys.path if not isinstance(entry, str) or entry.rstrip("/") != directory]
    sys.path_importer_cache.pop(directory, None)
    this = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # noqa: F401
    except ImportError as error:
        # Python 2 has no name there, and ignores each ImportError of a sitecustomize.
        if getattr(error, "name", "sitecustomize") != "sitecustomize":
            raise
        if this is not None:
            sys.modules["sitecustomize"] = this


_disabled = os.environ.get("GPUMEM_DISABLED", "").strip().lower() in ("1", "true", "yes", "on")
if sys.version_info >= (3, 6) and not _disabled:  # injection.py and hooks/cuda_start.py need it
    if "torch" in sys.modules:
        _inject()
    else:
        sys.meta_path.insert(0, _TorchFinder())
_chain(__file__.rsplit("/", 1)[0])
