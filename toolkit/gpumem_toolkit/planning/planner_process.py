"""Runs the planner in a fresh interpreter.

The worker reads a function with its arguments from standard input, and writes the outcome to standard output. What the
job's code prints goes to standard error.
"""

from __future__ import annotations

import importlib
import os
import pickle
import pkgutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.spawn import prepare
from pathlib import Path
from typing import Any, cast

from gpumem_client.wire.errors import ConfigurationError

TIMEOUT_SECONDS = 600.0
"""The default time limit of a plan. Plans of models with billions of parameters take about a minute."""
_LONGEST_SECONDS = 1_000_000
# The time that the worker has to start, and to end itself after the time limit, before it is killed. The error of a
# worker that ends itself names the step and the line of the job's code.
_GRACE_SECONDS = 30.0

_START = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from gpumem_toolkit.planning import planner_process; planner_process.main()"
)
_CLEAR = "\r\033[K"
_FIRST_LINE_SECONDS = 30.0

_in_worker = False


class WorkerError(Exception):
    """An error in the worker, as the text of its traceback."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def run_in_worker(
    function: Callable[..., Any],
    /,
    *arguments: Any,
    uses_cuda: bool = False,
    timeout_seconds: float = TIMEOUT_SECONDS,
    **options: Any,
) -> Any:
    """Call a module-level function of the planner in a fresh interpreter, and return its result.

    The function also receives the worker's `progress`. The arguments are pickled, with cloudpickle if pickle fails. The
    time limit includes the imports of the worker, which sees the GPUs only if `uses_cuda` is set. Raises
    ConfigurationError if the function raised one, the arguments cannot be pickled, the worker was killed, or the time
    limit has passed. Raises RuntimeError if the function raised another error. A WorkerError is the cause.
    """
    if _in_worker:
        raise ConfigurationError(
            "the planner imports this script to find the model: call `plan` under `if __name__ == '__main__':`"
        )
    if not 0 < timeout_seconds <= _LONGEST_SECONDS:
        raise ConfigurationError(
            f"invalid timeout {timeout_seconds:g}: it must be above 0 s and at most {_LONGEST_SECONDS} s"
        )
    # The planner replaces CPU kernels of PyTorch and stops the garbage collector. A process of its own keeps both away
    # from the caller.
    main = _main_module()
    call = _dump((function, arguments, options), importable=bool(main))
    torch = sys.modules.get("torch")
    dtype = "" if torch is None else str(torch.get_default_dtype())  # a plan depends on it
    request = timeout_seconds, main if b"__main__" in call else {}, dtype, call
    environment = {**os.environ, "GPUMEM_DISABLED": "1"}  # the worker is no job: it must not report
    if not uses_cuda:  # a factory that looks for a GPU would otherwise create a context and take its memory
        environment["CUDA_VISIBLE_DEVICES"] = ""
    try:
        ended = subprocess.run(  # noqa: S603 - this interpreter; KeyboardInterrupt and other exceptions kill the worker
            [sys.executable, "-c", _START],
            input=pickle.dumps(sys.path) + pickle.dumps(request),
            stdout=subprocess.PIPE,
            env=environment,
            check=False,
            timeout=timeout_seconds + _GRACE_SECONDS,
        )
    except subprocess.TimeoutExpired as late:
        raise ConfigurationError(f"no plan after {timeout_seconds:g} s, and the planner's process hung") from late
    if not ended.stdout:
        code = ended.returncode
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        raise ConfigurationError(f"the planner's process ended with {how} and returned no result")
    value, error, trace = pickle.loads(ended.stdout)  # noqa: S301 - from the process started above
    if error is not None:
        raise error from WorkerError(trace)
    return value


def _main_module() -> dict[str, str]:
    """Return how `multiprocessing.spawn` imports the caller's `__main__`; empty in a notebook, which has no file."""
    module = sys.modules["__main__"]
    spec, path = getattr(module, "__spec__", None), getattr(module, "__file__", None)
    if spec is not None:
        return {"init_main_from_name": spec.name}
    return {} if path is None else {"init_main_from_path": str(Path(path).absolute())}


def _dump(call: Any, *, importable: bool) -> bytes:
    """Pickle a call. `importable`: the worker can import the caller's `__main__`."""
    # pickle names functions, which the worker then imports. cloudpickle copies those that it cannot import.
    try:
        data = pickle.dumps(call)
        if importable or b"__main__" not in data:
            return data
        reason = "it is defined in a notebook or an interactive session"
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        reason = str(error)
    try:
        return cast(bytes, importlib.import_module("cloudpickle").dumps(call))
    except Exception as error:
        raise ConfigurationError(
            f"the job cannot be passed to the planner's process: {reason}; {error}. "
            "Define it at the top level of a module or script, or install cloudpickle: pip install cloudpickle"
        ) from error


class Named:
    """The callable `package.module:name`. The worker imports it when it unpickles it."""

    def __init__(self, text: str) -> None:
        module, _, name = text.partition(":")
        if not (module and name):
            raise ConfigurationError(
                f"invalid callable {text!r}: write MODULE:NAME, such as mypackage.train:make_model"
            )
        self._text = text

    def __reduce__(self) -> tuple[Any, ...]:
        return _load, (self._text,)


def _load(text: str) -> Any:
    """Import `package.module:name`; modules of the working directory come first."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = pkgutil.resolve_name(text)
    except Exception as error:
        raise ConfigurationError(f"{text!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise ConfigurationError(f"{text!r} is not a function or a class")
    return found


def main() -> None:
    """Serve one request, as the worker."""
    global _in_worker
    _in_worker = True
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the worker without a traceback
    with os.fdopen(os.dup(1), "wb") as results:
        os.dup2(2, 1)  # what the job's code prints must not be among the results
        timeout_seconds, *request = pickle.load(sys.stdin.buffer)  # noqa: S301 - from the process that started this one

        def expire() -> None:
            results.write(pickle.dumps(_expired(timeout_seconds, progress.step)))
            results.flush()
            os._exit(0)

        progress, limit = Progress(), threading.Timer(timeout_seconds, expire)
        limit.daemon = True
        limit.start()
        with progress:
            outcome = _serve(progress, *request)
        limit.cancel()
        results.write(pickle.dumps(outcome))


def _serve(progress: Progress, main: dict[str, str], dtype: str, call: bytes) -> tuple[Any, Exception | None, str]:
    """Return the result, and None or an error with the traceback of its cause."""
    try:
        if dtype:
            torch = importlib.import_module("torch")
            torch.set_default_dtype(getattr(torch, dtype.removeprefix("torch.")))
        prepare(main)
        function, arguments, options = pickle.loads(call)  # noqa: S301 - from the process that started this one
        return function(*arguments, progress=progress, **options), None, ""
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the caller raises it
        trace = "".join(traceback.format_exception(error.__cause__ or error))
        if isinstance(error, ConfigurationError):
            return None, ConfigurationError(str(error)), trace
        return None, RuntimeError(f"{type(error).__name__}: {error}"), trace


def place(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return the file and line of the last frame outside PyTorch, the standard library and the planner."""
    torch = sys.modules.get("torch")
    others = ("<", str(Path(__file__).parents[1]), *getattr(torch, "__path__", ()))
    library = sysconfig.get_path("stdlib")

    def is_of_the_job(file: str) -> bool:
        return not file.startswith(others) and ("site-packages" in file or not file.startswith(library))

    outside = [frame for frame in frames if is_of_the_job(frame.filename)] or frames
    return f"{outside[-1].filename}:{outside[-1].lineno}"


def _expired(timeout_seconds: float, step: str) -> tuple[None, Exception, str]:
    """Describe where the main thread is after the time limit."""
    frames = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident or 0])
    error = ConfigurationError(
        f"no plan after {timeout_seconds:g} s, at {place(frames)} in {step}; allow more time with --timeout SECONDS, "
        "or plan less with --no-changes"
    )
    return None, error, "".join(traceback.format_list(frames))


class Progress:
    """The current step of a plan. A thread shows it on standard error while the context is active."""

    def __init__(self) -> None:
        self.step = "importing PyTorch and the job"
        self._stream = sys.stderr
        self._terminal = sys.stderr.isatty()
        self._runs = 0
        self._started = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gpumem-plan-progress", daemon=True)

    def of(self, name: str) -> Callable[[int], None]:
        """Return a function that sets the step to a run of the named job at a batch size."""

        def run(batch: int) -> None:
            self._runs += 1
            self.step = f"run {self._runs}: {name}, batch {batch}"
            if self._terminal and self._thread.is_alive():
                self._show()

        return run

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        if self._terminal:
            print(_CLEAR, end="", file=self._stream, flush=True)

    def _watch(self) -> None:
        # On a terminal one line is rewritten each second. In a log, which keeps every line, there is a line after 30 s,
        # and whenever the time has doubled.
        next_line_seconds = _FIRST_LINE_SECONDS
        while not self._ended.wait(1.0):
            if self._terminal or time.monotonic() - self._started >= next_line_seconds:
                next_line_seconds *= 2
                self._show()

    def _show(self) -> None:
        text = f"planning for {time.monotonic() - self._started:.0f} s: {self.step}"
        print(f"{_CLEAR}{text} …" if self._terminal else f"{text}\n", end="", file=self._stream, flush=True)
