"""`plan`: batch size, gradient accumulation and memory of a job before it runs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from gpumem_client.wire.errors import ConfigurationError
from gpumem_exporter.cli.options import command_from_options
from gpumem_exporter.cli.render.terminal import print_json
from gpumem_exporter.errors import NvmlError
from gpumem_toolkit.planning.tables import show_plan
from gpumem_toolkit.planning.worker import TIMEOUT_SECONDS, named

if TYPE_CHECKING:
    from gpumem_toolkit.planning.devices import Gpu
    from gpumem_toolkit.planning.job import Job
    from gpumem_toolkit.planning.plan import Plan

__all__ = ["build"]

_EXAMPLES = """\b
Examples:
  gpumem-exporter plan train:make_model --input 'float32[B,3,224,224]' --target 'int64[B]' \\
      --optimizer adamw --precision bf16 --gpu 80GiB --target-effective-batch 512
  gpumem-exporter plan --layers 32 --hidden 4096 --sequence 4096 --parameters 7e9 --precision pure-bf16 --gpu h200
  gpumem-exporter plan train:make_model --input 'int64[B,1024]' --gpu h100-80gb --batch 8 --accumulation 2
  gpumem-exporter plan train:make_model --input 'int64[B,1024]' --profile --batch 4
  gpumem-exporter plan train:make_model --input 'float32[B,256]' --gpu 24GiB \\
      --apply config.yaml --map train.batch_size=batch --map train.accumulation=accumulation
  gpumem-exporter plan --restore config.yaml
  gpumem-exporter plan train:make_model --input 'float32[B,256]' --gpu 24GiB --json > plan.json
  gpumem-exporter run --plan plan.json -- python train.py    # exports the error of the plan
"""

_PLANNED = ("batch", "accumulation", "effective_batch")
"""The values of a plan that `--map` assigns to keys."""

_PROFILED_BATCH = 8
_PLANNED_AS = typer.Option("--precision", help="fp32; bf16 or fp16 (autocast); pure-bf16 or pure-fp16.")


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The options of `plan`."""

    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODULE:FACTORY]", help="A callable that returns the nn.Module."),
    ] = None
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", metavar="TENSOR", help="An argument of the model: float32[B,3,224,224]."),
    ] = None
    targets: Annotated[
        list[str] | None,
        typer.Option("--target", metavar="TENSOR", help="An argument of the loss after the output: int64[B]."),
    ] = None
    loss: Annotated[
        str,
        typer.Option("--loss", help="auto, cross_entropy, mse, mean, sum, output, or MODULE:FUNCTION."),
    ] = "auto"
    optimizer: Annotated[
        str,
        typer.Option(
            "--optimizer",
            help="An optimizer of torch.optim such as adamw, adamw8bit, described (--optimizer-option bytes=2.06: "
            "state per trainable parameter), none, or MODULE:FACTORY.",
        ),
    ] = "adamw"
    optimizer_options: Annotated[
        list[str] | None,
        typer.Option("--optimizer-option", metavar="NAME=VALUE", help="Such as fused=true or momentum=0.9."),
    ] = None
    precision: Annotated[str, _PLANNED_AS] = "fp32"
    attention: Annotated[str, typer.Option("--attention", help="auto, flash, efficient, math or cudnn.")] = "auto"
    convolution: Annotated[str, typer.Option("--convolution", help="cudnn, or native if cuDNN is off.")] = "cudnn"
    checkpointing: Annotated[bool, typer.Option("--checkpointing", help="Recompute the repeated blocks.")] = False
    loop: Annotated[
        str,
        typer.Option(
            "--loop",
            help="script: out = model(...); out.loss.backward(); trainer: the output is dropped before backward.",
        ),
    ] = "script"
    layers: Annotated[int | None, typer.Option("--layers", help="Without a model: number of transformer blocks.")] = (
        None
    )
    hidden: Annotated[int | None, typer.Option("--hidden", help="Without a model: width of the transformer.")] = None
    sequence: Annotated[int | None, typer.Option("--sequence", help="Tokens of one sample.")] = None
    parameters: Annotated[float | None, typer.Option("--parameters", help="Number of parameters: 7e9.")] = None
    vocabulary: Annotated[int, typer.Option("--vocabulary", help="Number of different tokens.")] = 32000
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", metavar="SIZE|NAME", help="80GiB, h100-80gb, … Default: this node's smallest GPU."),
    ] = None
    overhead: Annotated[
        str | None, typer.Option("--overhead", metavar="SIZE", help="Memory of context and driver. Default: 768MiB.")
    ] = None
    margin: Annotated[float, typer.Option("--margin", help="Part of the free memory that the plan uses.")] = 0.85
    target_effective_batch: Annotated[
        int | None, typer.Option("--target-effective-batch", help="Samples in one optimizer step over all devices.")
    ] = None
    batch: Annotated[
        int | None,
        typer.Option(
            "--batch",
            help="Plan this batch size instead of the largest. With --profile: the larger batch size measured, default "
            f"{_PROFILED_BATCH}.",
        ),
    ] = None
    accumulation: Annotated[
        int, typer.Option("--accumulation", help="Backward passes before each step of the optimizer.")
    ] = 1
    devices: Annotated[int, typer.Option("--devices", help="Data-parallel processes.")] = 1
    multiple_of: Annotated[int, typer.Option("--multiple-of", help="Batch sizes are multiples of this number.")] = 1
    changes: Annotated[
        bool, typer.Option("--changes/--no-changes", help="Also plan changes that save memory; takes longer.")
    ] = True
    profile: Annotated[bool, typer.Option("--profile", help="Measure two steps on this machine's first GPU.")] = False
    timeout: Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="Time limit of the plan.")] = (
        TIMEOUT_SECONDS
    )
    apply: Annotated[
        list[Path] | None,
        typer.Option("--apply", metavar="FILE", help="Write the plan into a .yaml or .toml file; keeps FILE.backup."),
    ] = None
    map: Annotated[
        list[str] | None,
        typer.Option(
            "--map", metavar="KEY=VALUE", help="The key that receives batch, accumulation or effective_batch."
        ),
    ] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With --apply: show the change, write nothing.")] = False
    restore: Annotated[
        list[Path] | None,
        typer.Option("--restore", metavar="FILE", help="Restore FILE from its backup; plans nothing."),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, sizes in bytes.")] = False


def build(name: str) -> typer.Typer:
    """Return the command."""
    return command_from_options(name, plan, PlanOptions, epilog=_EXAMPLES)


def plan(options: PlanOptions) -> int:
    """Predict the GPU memory of a training job before it runs.

    Builds the model in a separate process and simulates a few training steps, which needs no GPU and almost no memory.
    The tensors have no values; a model of PyTorch's allocator places them. --profile measures on a GPU instead. Without
    a model, describe a transformer by its dimensions.

    Exit code 1: not even a batch of one sample fits, or --batch does not.
    """
    if options.restore:
        return _restore_files(options.restore)
    if bool(options.apply) != bool(options.map):
        raise ConfigurationError("--apply FILE and --map KEY=VALUE must be used together")
    # Planning can take minutes: first check that the files can be changed.
    _planned_texts(options.apply or (), options.map or (), dict.fromkeys(_PLANNED, 1))
    made = _plan(options)
    if options.as_json:
        print_json(made.as_dict())
    else:
        show_plan(made)
    if not made.fits:
        return 1
    if options.apply:
        # Standard output has only the JSON document.
        file = sys.stderr if options.as_json else sys.stdout
        _change_files(options.apply, options.map or [], made, write=not options.dry_run, file=file)
    return 0


def _plan(options: PlanOptions) -> Plan:
    from gpumem_toolkit.planning.plan import Target
    from gpumem_toolkit.planning.planner import plan_in_worker, profile_in_worker

    described = options.model is None
    job = _described_job(options) if described else _coded_job(options)
    gpu = _gpu(options)
    chosen = None if options.profile else options.batch
    target = Target(options.target_effective_batch, options.devices, options.margin, options.multiple_of, chosen)
    if options.profile:
        measured = _PROFILED_BATCH if options.batch is None else options.batch
        return profile_in_worker(job, gpu, target, batch=measured, timeout_seconds=options.timeout)
    source = "description" if described else "model"
    return plan_in_worker(job, gpu, target, source=source, changes=options.changes, timeout_seconds=options.timeout)


def _change_files(paths: Sequence[Path], maps: Sequence[str], plan: Plan, *, write: bool, file: IO[str]) -> None:
    """Print the changes of each file. If `write` is set, write the files after all of them have been checked.

    Raises:
        ConfigurationError: a file or a key cannot be changed. No file is changed then.
    """
    from gpumem_toolkit.planning.configuration import apply, backup_of, diff

    texts = _planned_texts(paths, maps, {name: getattr(plan, name) for name in _PLANNED})
    for path, before, after in texts:
        print(diff(path, before, after) or f"{path} already has these values\n", end="", file=file)
    for path, before, after in texts if write else ():
        if before != after:
            apply(path, before, after)
            print(f"changed {path}; the previous version is {backup_of(path)}", file=file)


def _planned_texts(
    paths: Sequence[Path], maps: Sequence[str], planned: Mapping[str, int]
) -> list[tuple[Path, str, str]]:
    """Return the path of each file and its text before and after the change.

    Raises:
        ConfigurationError: a file or a key cannot be changed, or the extra `plan` is not installed.
    """
    from gpumem_toolkit.planning.configuration import parse_map, planned_text

    values = parse_map(maps, planned)
    return [(path, *planned_text(path, values)) for path in paths]


def _restore_files(paths: Sequence[Path]) -> int:
    """Restore files from their backups."""
    from gpumem_toolkit.planning.configuration import restore

    for path in paths:
        restore(path)
        print(f"restored {path}")
    return 0


def _coded_job(options: PlanOptions) -> Job:
    from gpumem_toolkit.planning.job import Job, parse_tensor

    if options.layers is not None or options.parameters is not None:
        raise ConfigurationError("use either a model or --layers and --parameters, not both")
    if not options.inputs:
        raise ConfigurationError("no --input; give the model's arguments, such as --input 'float32[B,3,224,224]'")
    inputs = tuple(map(parse_tensor, options.inputs))
    targets = tuple(map(parse_tensor, options.targets or ()))
    return Job(
        named(options.model or ""), inputs, targets, loss=_name_or_callable(options.loss), **_job_options(options)
    )


def _described_job(options: PlanOptions) -> Job:
    from gpumem_toolkit.planning.description import Description

    if options.layers is None or options.hidden is None or options.sequence is None:
        raise ConfigurationError("use MODULE:FACTORY, or describe a transformer: --layers, --hidden and --sequence")
    count = None if options.parameters is None else int(options.parameters)
    description = Description(options.layers, options.hidden, options.sequence, count, options.vocabulary)
    return description.job(**_job_options(options))


def _job_options(options: PlanOptions) -> dict[str, Any]:
    return {
        "optimizer": _name_or_callable(options.optimizer),
        "optimizer_options": dict(map(_named_value, options.optimizer_options or ())),
        "precision": options.precision,
        "attention": options.attention,
        "convolution": options.convolution,
        "accumulation": options.accumulation,
        "checkpointing": options.checkpointing,
        "loop": options.loop,
    }


def _name_or_callable(text: str) -> Any:
    return named(text) if ":" in text else text


def _named_value(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise ConfigurationError(f"invalid --optimizer-option {text!r}: write NAME=VALUE, such as momentum=0.9")
    words = {"true": True, "false": False, "none": None}
    if value.lower() in words:
        return name, words[value.lower()]
    try:
        return name, float(value) if any(c in value for c in ".e") else int(value)
    except ValueError:
        return name, value


def _gpu(options: PlanOptions) -> Gpu:
    from gpumem_toolkit.planning.devices import parse_bytes, parse_gpu

    overhead = None if options.overhead is None else parse_bytes(options.overhead)
    return _smallest_gpu(overhead) if options.gpu is None else parse_gpu(options.gpu, overhead)


def _smallest_gpu(overhead_bytes: int | None) -> Gpu:
    """Return this node's smallest GPU, with at least the memory that its driver reserves as overhead."""
    from gpumem_exporter.nvml.pynvml_provider import PynvmlProvider
    from gpumem_toolkit.planning.devices import DEFAULT_OVERHEAD_BYTES, Gpu

    provider = PynvmlProvider()
    try:
        provider.open()
        devices = [(provider.read_memory(device.uuid), device.name) for device in provider.devices()]
    except NvmlError as error:
        raise ConfigurationError(
            f"give --gpu, such as --gpu 80GiB; this node's GPUs cannot be read: {error}"
        ) from error
    finally:
        provider.close()
    if not devices:
        raise ConfigurationError("give --gpu, such as --gpu 80GiB; this node has no GPU")
    memory, name = min(devices, key=lambda device: device[0].total_bytes)
    overhead = DEFAULT_OVERHEAD_BYTES if overhead_bytes is None else overhead_bytes
    return Gpu(name, memory.total_bytes, max(overhead, memory.reserved_bytes or 0))
