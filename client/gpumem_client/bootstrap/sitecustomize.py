"""Starts a reporter when CUDA is initialized, in every Python process that has this folder in its PYTHONPATH.

`gpumem-run` sets PYTHONPATH to this folder, and a platform sets it to the folder of the exporter's
`--client.directory`, where this file is a link to the current version. Any interpreter may run it, so it compiles
also in Python 2. Without torch it imports only `sys` and does nothing more; every line costs each process the time to
compile it, because the job may not be allowed to write bytecode. It imports the `sitecustomize` that it hides, and
never raises: after an error the program runs as it would without the client.
"""

import sys

_OLDEST = (3, 8)
"""The oldest Python of the client."""


class _TorchFinder:
    """Finds nothing, and waits until torch is imported."""

    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            # A new list, because another thread may be searching in this one.
            sys.meta_path = [finder for finder in sys.meta_path if finder is not self]
            _wait_for_cuda()


def _chain():
    """Import the `sitecustomize` that would have been found without this directory."""
    directory = __file__.rsplit("/", 1)[0]
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


def _package():
    """Return the folder of the package. In a folder of the exporter, an upgrade replaces it."""
    import os

    return os.path.realpath(__file__).rsplit("/", 2)[0]


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


def _wait_for_cuda():
    try:
        _load("_gpumem_cuda_start", _package() + "/hooks/cuda_start.py").when_cuda_starts(_start)
    except Exception:  # noqa: BLE001, S110 - the program must run in any case
        pass


def _start():
    """Start the reporter. This runs when CUDA is initialized."""
    if sys.version_info < _OLDEST:
        # Only here: a program without CUDA needs no reporter, and may have a stderr that another program reads.
        _warn("gpumem-client needs Python %d.%d or later, and this is Python %d.%d" % (_OLDEST + sys.version_info[:2]))
        return
    if "gpumem_client" not in sys.modules:
        try:
            import gpumem_client  # noqa: F401
        except ModuleNotFoundError:
            # Another environment's Python: load this package without adding its neighbors to sys.path.
            package = _package()
            _load("gpumem_client", package + "/__init__.py", package)
    import gpumem_client as client

    try:
        client.start()
    except Exception as error:  # noqa: BLE001 - for example an invalid URL: the program runs, and the error is logged
        _warn(error)


def _warn(reason):
    import logging

    logging.getLogger("gpumem_client").warning("this process is not reported: %s", reason)


def _inject():
    import os

    if os.environ.get("GPUMEM_DISABLED", "").strip().lower() in ("1", "true", "yes", "on"):
        return
    if "torch" in sys.modules:
        _wait_for_cuda()
    else:
        sys.meta_path.insert(0, _TorchFinder())


if sys.version_info >= (3, 6):  # hooks/cuda_start.py needs it
    _inject()
_chain()
