"""Runs the planner in a fresh interpreter.

The worker reads a function with its arguments from standard input, and writes the outcome to standard output. What the
job's code prints goes to standard error.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import math
import os
import pickle
import runpy
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import traceback
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar, cast

from gpumem_client.wire.errors import ConfigurationError

TIMEOUT_SECONDS = 600.0
"""The default time limit of a plan. Plans of models with billions of parameters take about a minute."""
_LONGEST_SECONDS = 1_000_000
# The time that the worker has to start, and to end itself after the time limit, before it is killed. The error of a
# worker that ends itself names the step and the line of the job's code.
_GRACE_SECONDS = 30.0

_Result = TypeVar("_Result")
_START = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from gpumem_toolkit.planning import worker; worker.main()"
)
_CLEAR = "\r\033[K"
_FIRST_LINE_SECONDS = 30.0
# The name under which the worker imports the caller's script. Code under a `__main__` guard does not run then.
_SCRIPT = "__gpumem_script__"

_in_worker = False


class WorkerError(Exception):
    """An error in the worker, as the text of its traceback."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True)
class _Setup:
    """What the worker prepares before it unpickles the request."""

    main: str | None
    """The caller's `__main__` as the name of a module; None for a script."""
    script: str | None
    """The path of the caller's script; None without a script, as in a notebook."""
    torch: dict[str, Any]
    """Settings of PyTorch that change a plan."""

    @classmethod
    def of_this_process(cls) -> _Setup:
        """Describe the process that requests the plan."""
        module = sys.modules["__main__"]
        spec = getattr(module, "__spec__", None)
        path = getattr(module, "__file__", None)
        torch = sys.modules.get("torch")
        settings = {}
        if torch is not None:
            cuda = torch.backends.cuda
            settings = {"dtype": torch.get_default_dtype()}
            settings |= {"flash": cuda.flash_sdp_enabled(), "efficient": cuda.mem_efficient_sdp_enabled()}
        return cls(spec.name if spec is not None else None, path, settings)


@dataclass(frozen=True)
class _Outcome:
    """A result, or an error: its text, the traceback of its cause, and whether it is a ConfigurationError."""

    value: Any = None
    error: str | None = None
    traceback: str = ""
    expected: bool = True


def run_in_worker(
    function: Callable[..., _Result],
    /,
    *arguments: Any,
    uses_cuda: bool = False,
    timeout_seconds: float = TIMEOUT_SECONDS,
    **options: Any,
) -> _Result:
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
    setup = _Setup.of_this_process()
    call = _dump((function, arguments, options), setup)
    environment = {**os.environ, "GPUMEM_DISABLED": "1"}  # the worker is no job: it must not report
    if not uses_cuda:  # a factory that looks for a GPU would otherwise create a context and take its memory
        environment["CUDA_VISIBLE_DEVICES"] = ""
    try:
        ended = subprocess.run(  # noqa: S603 - this interpreter; KeyboardInterrupt and other exceptions kill the worker
            [sys.executable, "-c", _START],
            input=b"".join(map(pickle.dumps, (sys.path, timeout_seconds, setup))) + call,
            stdout=subprocess.PIPE,
            env=environment,
            check=False,
            timeout=timeout_seconds + _GRACE_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigurationError(f"no plan after {timeout_seconds:g} s, and the planner's process hung") from error
    if not ended.stdout:
        code = ended.returncode
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        raise ConfigurationError(f"the planner's process ended with {how} and returned no result")
    outcome: _Outcome = pickle.loads(ended.stdout)  # noqa: S301 - from the process started above
    if outcome.error is None:
        return cast(_Result, outcome.value)
    kind = ConfigurationError if outcome.expected else RuntimeError
    raise kind(outcome.error) from WorkerError(outcome.traceback)


def named(text: str) -> Any:
    """Return a placeholder for the callable `package.module:name`. The worker imports it when it unpickles it."""
    module, _, name = text.partition(":")
    if not (module and name):
        raise ConfigurationError(f"invalid callable {text!r}: write MODULE:NAME, such as mypackage.train:make_model")
    return _Named(text)


class _Named:
    def __init__(self, text: str) -> None:
        self._text = text

    def __reduce__(self) -> tuple[Any, ...]:
        return _load, (self._text,)


def _load(text: str) -> Callable[..., Any]:
    """Import `package.module:name`; modules of the working directory come first."""
    module, _, name = text.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"{text!r}: there is no module {error.name!r}") from error
    except Exception as error:
        raise ConfigurationError(f"{text!r}: the import failed: {type(error).__name__}: {error}") from error
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise ConfigurationError(f"{text!r}: {module} has no callable {name}")
    return cast(Callable[..., Any], found)


def _dump(call: Any, setup: _Setup) -> bytes:
    """Pickle a call. Raises ConfigurationError if it refers to something that the worker cannot import."""
    # pickle names functions, which the worker then imports. cloudpickle copies those that it cannot import.
    try:
        data = pickle.dumps(call)
        if setup.main or setup.script or b"__main__" not in data:
            return data
        reason = "it is defined in a notebook or an interactive session"
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        reason = str(error)
    try:
        cloudpickle = importlib.import_module("cloudpickle")
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"the job cannot be passed to the planner's process: {reason}. "
            "Define it at the top level of a module or script, or install cloudpickle: pip install cloudpickle"
        ) from error
    try:
        return cast(bytes, cloudpickle.dumps(call))
    except Exception as error:
        raise ConfigurationError(f"the job cannot be passed to the planner's process: {error}") from error


def main() -> None:
    """Serve one request, as the worker."""
    global _in_worker
    _in_worker = True
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the worker without a traceback
    with os.fdopen(os.dup(1), "wb") as results:
        os.dup2(2, 1)  # what the job's code prints must not be among the results
        timeout_seconds: float = pickle.load(sys.stdin.buffer)  # noqa: S301 - from the process that started this one

        def expire(step: str) -> None:
            results.write(pickle.dumps(_expired(timeout_seconds, step)))
            results.flush()
            os._exit(0)

        with Progress(timeout_seconds, expire) as progress:
            outcome = _serve(sys.stdin.buffer, progress)
        results.write(pickle.dumps(outcome))


def place(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return the file and line of the last frame outside PyTorch, the standard library and the planner."""
    torch = sys.modules.get("torch")
    others = ("<", str(Path(__file__).parents[1]), *getattr(torch, "__path__", ()))
    library = sysconfig.get_path("stdlib")

    def is_of_the_job(file: str) -> bool:
        return not file.startswith(others) and ("site-packages" in file or not file.startswith(library))

    outside = [frame for frame in frames if is_of_the_job(frame.filename)] or frames
    return f"{outside[-1].filename}:{outside[-1].lineno}"


def _expired(timeout_seconds: float, step: str) -> _Outcome:
    """Describe where the main thread is after the time limit."""
    frames = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident or 0])
    error = (
        f"no plan after {timeout_seconds:g} s, at {place(frames)} in {step}; allow more time with --timeout SECONDS, "
        "or plan less with --no-changes"
    )
    return _Outcome(error=error, traceback="".join(traceback.format_list(frames)))


def _serve(requests: IO[bytes], progress: Progress) -> _Outcome:
    try:
        return _Outcome(_call(requests, progress))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the caller raises it
        trace = "".join(traceback.format_exception(error.__cause__ or error))
        if isinstance(error, ConfigurationError):
            return _Outcome(error=str(error), traceback=trace)
        return _Outcome(error=f"{type(error).__name__}: {error}", traceback=trace, expected=False)


def _call(requests: IO[bytes], progress: Progress) -> Any:
    if importlib.util.find_spec("torch") is None:
        raise ConfigurationError("the planner runs the model in PyTorch, which is not installed")
    import torch

    setup: _Setup = pickle.load(requests)  # noqa: S301 - from the process that started this one
    if setup.torch:
        torch.set_default_dtype(setup.torch["dtype"])
        torch.backends.cuda.enable_flash_sdp(setup.torch["flash"])
        torch.backends.cuda.enable_mem_efficient_sdp(setup.torch["efficient"])
    progress.step("importing the job")
    try:
        function, arguments, options = _Unpickler(io.BytesIO(requests.read()), setup).load()
    except ConfigurationError:
        raise
    except (Exception, SystemExit) as error:
        text = f"{type(error).__name__}: {error}"
        raise ConfigurationError(f"the planner's process cannot load the job: {text}") from error
    return function(*arguments, progress=progress, **options)


class _Unpickler(pickle.Unpickler):
    """Imports the caller's script when the request refers to it."""

    def __init__(self, file: IO[bytes], setup: _Setup) -> None:
        super().__init__(file)
        self._setup = setup
        self._main: Any = None

    def find_class(self, module: str, name: str) -> Any:
        if module == "__main__" and self._main is None:
            self._main = sys.modules["__main__"] = self._import_main()
        return super().find_class(module, name)

    def _import_main(self) -> Any:
        if self._setup.main is not None:
            return importlib.import_module(self._setup.main)
        module = sys.modules[_SCRIPT] = types.ModuleType(_SCRIPT)
        vars(module).update(runpy.run_path(self._setup.script or "", run_name=_SCRIPT))
        return module


class Progress:
    """The current step of a plan. A thread shows it on standard error while the context is active.

    After the time limit the thread calls `expire` with the current step, which ends the process.
    """

    def __init__(self, limit_seconds: float = math.inf, expire: Callable[[str], None] = lambda _: None) -> None:
        self.current = "importing PyTorch"
        self._limit_seconds = limit_seconds
        self._expire = expire
        self._stream = sys.stderr
        self._terminal = sys.stderr.isatty()
        self._runs = 0
        self._started = time.monotonic()
        self._next_line_seconds = _FIRST_LINE_SECONDS
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gpumem-plan-progress", daemon=True)

    def step(self, text: str) -> None:
        """Set the current step."""
        self.current = text
        if self._terminal and self._thread.is_alive():
            self._show()

    def of(self, name: str) -> Callable[[int], None]:
        """Return a function that sets the step to a run of the named job at a batch size."""

        def run(batch: int) -> None:
            self._runs += 1
            self.step(f"run {self._runs}: {name}, batch {batch}")

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
        while not self._ended.wait(max(0.0, min(1.0, self._limit_seconds - self._elapsed()))):
            if self._elapsed() >= self._limit_seconds:
                self._expire(self.current)
                return
            # On a terminal one line is rewritten each second. In a log, which keeps every line, there is a line after
            # 30 s, and whenever the time has doubled.
            if self._terminal or self._elapsed() >= self._next_line_seconds:
                self._next_line_seconds *= 2
                self._show()

    def _elapsed(self) -> float:
        return time.monotonic() - self._started

    def _show(self) -> None:
        text = f"planning for {self._elapsed():.0f} s: {self.current}"
        print(f"{_CLEAR}{text} …" if self._terminal else f"{text}\n", end="", file=self._stream, flush=True)
