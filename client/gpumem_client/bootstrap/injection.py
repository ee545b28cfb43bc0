"""Starts a reporter when CUDA is initialized. `sitecustomize.py` runs this file when the process imports torch.

It compiles in Python 3.6, which the client does not support, and imports nothing but what every interpreter has loaded.
"""

import sys

_OLDEST = (3, 8)


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
    if sys.version_info < _OLDEST:
        # Only now: a program without CUDA needs no reporter, and another program may read its stderr.
        _warn("gpumem-client needs Python %d.%d or later, and this is Python %d.%d" % (_OLDEST + sys.version_info[:2]))
        return
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
        _warn(error)


def _warn(reason):
    import logging

    logging.getLogger("gpumem_client").warning("this process is not reported: %s", reason)


_package = __file__.rsplit("/", 2)[0]
_load("_gpumem_cuda_start", _package + "/hooks/cuda_start.py").when_cuda_starts(lambda: _start(_package))
