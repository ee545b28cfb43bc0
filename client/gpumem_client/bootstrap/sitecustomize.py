"""Starts a reporter when CUDA is initialized, in every Python process below `gpumem-exporter run`.

The file imports only `sys` and what every interpreter has loaded anyway. It imports the `sitecustomize` that it hides,
and never raises: after an error the program runs as it would without the client.
"""

import sys


def _chain(directory):
    """Import the `sitecustomize` that would have been found without this directory."""
    # A .pth file may have put an entry there that is not a string; imports skip it.
    sys.path[:] = [entry for entry in sys.path if not isinstance(entry, str) or entry.rstrip("/") != directory]
    sys.path_importer_cache.pop(directory, None)
    this = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        if this is not None:
            sys.modules["sitecustomize"] = this


def _load(name, path, search=None):
    """Load a module from its file, also if it is not on sys.path."""
    # importlib.machinery exports these names too, but its import takes half the time of this file.
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


def _start(package):
    """Start the reporter. This runs when CUDA is initialized."""
    if "gpumem_client" not in sys.modules:
        try:
            import gpumem_client  # noqa: F401
        except ModuleNotFoundError:
            # Another environment's Python: load this package without adding its neighbors to sys.path.
            _load("gpumem_client", package + "/__init__.py", package)
    import gpumem_client as client

    try:
        client.start()
    except Exception as error:  # noqa: BLE001 - for example an invalid URL: the program runs, and the error is logged
        import logging

        logging.getLogger("gpumem_client").warning("this process is not reported: %s", error)


def _inject():
    import os

    if os.environ.get("GPUMEM_DISABLED", "").strip().lower() in ("1", "true", "yes", "on"):
        return
    package = __file__.rsplit("/", 2)[0]
    waiting = _load("_gpumem_cuda_start", package + "/hooks/cuda_start.py")
    waiting.when_cuda_starts(lambda: _start(package))


try:
    _inject()
except Exception:  # noqa: BLE001, S110 - the program must run in any case
    pass
_chain(__file__.rsplit("/", 1)[0])
