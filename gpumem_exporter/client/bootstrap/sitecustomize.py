"""Runs first in every Python process below `gpumem-exporter run`: starts a reporter where CUDA is initialised.

Imports nothing but `sys` and what every interpreter has loaded anyway, runs the `sitecustomize` that it hides, and
never raises: whatever goes wrong here, the program runs as if it had been started without us.
"""

import sys


def _chain(directory):
    """Import the `sitecustomize` that would have been found without this directory."""
    # a .pth file may have put something there that is no text, which imports pass over
    sys.path[:] = [entry for entry in sys.path if not isinstance(entry, str) or entry.rstrip("/") != directory]
    sys.path_importer_cache.pop(directory, None)
    ours = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        if ours is not None:
            sys.modules["sitecustomize"] = ours


def _load(name, path, search=None):
    """Load a module from its file, found or not on sys.path."""
    # importlib.machinery gives the same two, at the price of half of all that this file costs
    from _frozen_importlib import ModuleSpec
    from _frozen_importlib_external import SourceFileLoader

    loader = SourceFileLoader(name, path)
    spec = ModuleSpec(name, loader, origin=path, is_package=search is not None)
    spec.has_location = True
    if search is not None:
        spec.submodule_search_locations = [search]
    module = type(sys)(name)
    module.__spec__, module.__loader__, module.__file__ = spec, loader, path
    if search is not None:
        module.__path__ = [search]
        sys.modules[name] = module
    loader.exec_module(module)
    return module


def _begin(package):
    """Start the reporter; runs when CUDA is initialised."""
    if "gpumem_exporter" not in sys.modules:
        try:
            import gpumem_exporter  # noqa: F401
        except ModuleNotFoundError:
            # Another environment's Python: load this very package, without putting its neighbours on sys.path.
            _load("gpumem_exporter", package + "/__init__.py", package)
    from gpumem_exporter import client

    try:
        client.start()
    except Exception as error:  # noqa: BLE001 - an address that is none, say: the program runs, but somebody should know
        import logging

        logging.getLogger("gpumem_exporter.client").warning("this process is not reported: %s", error)


def _inject():
    import os

    if os.environ.get("GPUMEM_DISABLED", "").strip().lower() in ("1", "true", "yes", "on"):
        return
    package = __file__.rsplit("/", 3)[0]
    waiting = _load("_gpumem_cuda_start", package + "/client/hooks/cuda_start.py")
    waiting.when_cuda_starts(lambda: _begin(package))


try:
    _inject()
except Exception:  # noqa: BLE001, S110 - the program comes first
    pass
_chain(__file__.rsplit("/", 1)[0])
