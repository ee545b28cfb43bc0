"""`plan`: batch size, accumulation and where the memory goes, before a job runs."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpumem_exporter.cli.options import command_from_options
from gpumem_exporter.cli.plan_files import change_files, restore_files
from gpumem_exporter.cli.render.plan_tables import show_plan
from gpumem_exporter.cli.render.terminal import print_json
from gpumem_exporter.errors import ConfigurationError, NvmlError

if TYPE_CHECKING:
    from gpumem_exporter.training.planning.devices import Gpu
    from gpumem_exporter.training.planning.plan import Plan

__all__ = ["build"]

_EXAMPLES = """\b
Examples:
  gpumem-exporter plan train:make_model --input 'float32[B,3,224,224]' --target 'int64[B]' \\
      --optimizer adamw --precision bf16 --gpu 80GiB --target-effective-batch 512
  gpumem-exporter plan --layers 32 --hidden 4096 --sequence 4096 --parameters 7e9 --precision pure-bf16 --gpu h200
  gpumem-exporter plan train:make_model --input 'int64[B,1024]' --profile --batch 4
  gpumem-exporter plan train:make_model --input 'float32[B,256]' --gpu 24GiB \\
      --apply config.yaml --map train.batch_size=batch --map train.accumulation=accumulation
  gpumem-exporter plan --restore config.yaml
  gpumem-exporter plan train:make_model --input 'float32[B,256]' --gpu 24GiB --json > plan.json
  gpumem-exporter run --plan plan.json -- python train.py    # exports how far the plan was from what it takes
"""

_PLANNED_AS = typer.Option("--precision", help="fp32; bf16 or fp16 (autocast); pure-bf16 or pure-fp16.")


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What `plan` takes."""

    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODULE:FACTORY]", help="A callable without arguments that returns the nn.Module."),
    ] = None
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", metavar="TENSOR", help="What the model is called with: float32[B,3,224,224]."),
    ] = None
    targets: Annotated[
        list[str] | None,
        typer.Option("--target", metavar="TENSOR", help="What the loss is called with beside the output: int64[B]."),
    ] = None
    loss: Annotated[
        str,
        typer.Option("--loss", help="auto, cross_entropy, mse, mean, sum, output, or MODULE:FUNCTION."),
    ] = "auto"
    optimizer: Annotated[str, typer.Option("--optimizer", help="adamw, adam, sgd, …, none, or MODULE:FACTORY.")] = (
        "adamw"
    )
    optimizer_options: Annotated[
        list[str] | None,
        typer.Option("--optimizer-option", metavar="NAME=VALUE", help="As fused=true or momentum=0.9."),
    ] = None
    precision: Annotated[str, _PLANNED_AS] = "fp32"
    attention: Annotated[str, typer.Option("--attention", help="auto, flash, efficient, math or cudnn.")] = "auto"
    convolution: Annotated[str, typer.Option("--convolution", help="cudnn, or native where cuDNN is off.")] = "cudnn"
    checkpointing: Annotated[bool, typer.Option("--checkpointing", help="Recompute the repeated blocks.")] = False
    layers: Annotated[int | None, typer.Option("--layers", help="Of a transformer, described instead of coded.")] = None
    hidden: Annotated[int | None, typer.Option("--hidden", help="Its width.")] = None
    sequence: Annotated[int | None, typer.Option("--sequence", help="Tokens of a sample.")] = None
    parameters: Annotated[float | None, typer.Option("--parameters", help="How many it has: 7e9.")] = None
    vocabulary: Annotated[int, typer.Option("--vocabulary", help="Its tokens.")] = 32000
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", metavar="SIZE|NAME", help="80GiB, h100-80gb, … Default: this node's smallest device."),
    ] = None
    overhead: Annotated[
        str | None, typer.Option("--overhead", metavar="SIZE", help="Context and driver: 768MiB by default.")
    ] = None
    margin: Annotated[float, typer.Option("--margin", help="Part of the free memory to plan with.")] = 0.85
    target_effective_batch: Annotated[
        int | None, typer.Option("--target-effective-batch", help="Samples in an optimizer step, over all devices.")
    ] = None
    devices: Annotated[int, typer.Option("--devices", help="Data-parallel processes.")] = 1
    multiple_of: Annotated[int, typer.Option("--multiple-of", help="Batch sizes divide by this.")] = 1
    changes: Annotated[
        bool, typer.Option("--changes/--no-changes", help="Work out what else could be done: takes longer.")
    ] = True
    profile: Annotated[bool, typer.Option("--profile", help="Measure two steps on this machine's first GPU.")] = False
    batch: Annotated[int, typer.Option("--batch", help="With --profile: the larger batch size measured.")] = 8
    apply: Annotated[
        list[Path] | None,
        typer.Option("--apply", metavar="FILE", help="Write the plan into a .yaml or .toml file; keeps FILE.backup."),
    ] = None
    map: Annotated[
        list[str] | None,
        typer.Option("--map", metavar="KEY=VALUE", help="Which key gets batch, accumulation or effective_batch."),
    ] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With --apply: show the difference, write nothing.")] = (
        False
    )
    restore: Annotated[
        list[Path] | None, typer.Option("--restore", metavar="FILE", help="Undo --apply; plans nothing.")
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, sizes in bytes.")] = False


def build(name: str) -> typer.Typer:
    """Return the command."""
    return command_from_options(name, plan, PlanOptions, epilog=_EXAMPLES)


def plan(options: PlanOptions) -> int:
    """Say what a training job will take of a GPU, before it runs.

    The model is built and trained for a few steps on tensors without values, which needs no GPU and no memory; what it
    would allocate goes through a model of PyTorch's allocator. --profile measures on a GPU instead, and a transformer
    can also be described by its measures.

    Exit code 1: not even a batch of one fits.
    """
    if options.restore:
        return restore_files(options.restore)
    if bool(options.apply) != bool(options.map):
        raise ConfigurationError("--apply FILE and --map KEY=VALUE belong together")
    made = _plan(options)
    if options.as_json:
        print_json(made.as_dict())
    else:
        show_plan(made)
    if not made.fits:
        return 1
    if options.apply:
        # A program that reads the JSON on standard output is not to find a difference behind it.
        file = sys.stderr if options.as_json else sys.stdout
        change_files(options.apply, options.map or [], made, write=not options.dry_run, file=file)
    return 0


def _plan(options: PlanOptions) -> Plan:
    if not options.profile:
        # What runs on tensors without values has no business on a GPU, not even by accident.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        import torch  # noqa: F401 - everything below needs it
    except ModuleNotFoundError as error:
        raise ConfigurationError("plan runs the model in PyTorch, which is not installed here") from error
    from gpumem_exporter.training.planning.planner import plan_description, plan_job
    from gpumem_exporter.training.planning.profile import profile_job

    asked: dict[str, Any] = {
        "target_effective_batch": options.target_effective_batch,
        "devices": options.devices,
        "margin": options.margin,
        "multiple_of": options.multiple_of,
    }
    job = _job_options(options)
    gpu = _gpu(options)
    if options.model is None:
        description = _description(options)
        if options.profile:
            return profile_job(description.job(**job), gpu, batch=options.batch, **asked)
        return plan_description(description, gpu, changes=options.changes, **asked, **job)
    if options.layers is not None or options.parameters is not None:
        raise ConfigurationError("give a model or its measures, not both")
    if not options.inputs:
        raise ConfigurationError("--input says what the model is called with, such as --input 'float32[B,3,224,224]'")
    made = _coded_job(options, job)
    if options.profile:
        return profile_job(made, gpu, batch=options.batch, **asked)
    return plan_job(made, gpu, changes=options.changes, **asked)


def _coded_job(options: PlanOptions, job: dict[str, Any]) -> Any:
    from gpumem_exporter.training.planning.inputs import parse_tensor
    from gpumem_exporter.training.planning.job import Job

    inputs = tuple(map(parse_tensor, options.inputs or ()))
    targets = tuple(map(parse_tensor, options.targets or ()))
    loss = _load(options.loss) if ":" in options.loss else options.loss
    return Job(_load(options.model or ""), inputs, targets, loss=loss, **job)


def _job_options(options: PlanOptions) -> dict[str, Any]:
    return {
        "optimizer": _load(options.optimizer) if ":" in options.optimizer else options.optimizer,
        "optimizer_options": dict(map(_named_value, options.optimizer_options or ())),
        "precision": options.precision,
        "attention": options.attention,
        "convolution": options.convolution,
        "checkpointing": options.checkpointing,
    }


def _description(options: PlanOptions) -> Any:
    from gpumem_exporter.training.planning.description import Description

    if options.layers is None or options.hidden is None or options.sequence is None:
        raise ConfigurationError("give a model as MODULE:FACTORY, or describe one: --layers, --hidden and --sequence")
    count = None if options.parameters is None else int(options.parameters)
    return Description(options.layers, options.hidden, options.sequence, count, options.vocabulary)


def _load(text: str) -> Callable[..., Any]:
    """The callable that `package.module:name` names; modules of the working directory come first."""
    module_name, _, name = text.partition(":")
    if not (module_name and name):
        raise ConfigurationError(f"{text!r} names no callable; write MODULE:NAME, such as mypackage.train:make_model")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"{text!r}: no module {error.name!r} here") from error
    except Exception as error:
        raise ConfigurationError(f"{text!r}: importing it failed: {type(error).__name__}: {error}") from error
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise ConfigurationError(f"{text!r}: {module_name} has no callable {name}")
    callable_: Callable[..., Any] = found
    return callable_


def _named_value(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise ConfigurationError(f"--optimizer-option {text!r}: write NAME=VALUE, such as momentum=0.9")
    words = {"true": True, "false": False, "none": None}
    if value.lower() in words:
        return name, words[value.lower()]
    try:
        return name, float(value) if any(c in value for c in ".e") else int(value)
    except ValueError:
        return name, value


def _gpu(options: PlanOptions) -> Gpu:
    from gpumem_exporter.training.planning.devices import parse_bytes, parse_gpu

    overhead = None if options.overhead is None else parse_bytes(options.overhead)
    return _this_nodes(overhead) if options.gpu is None else parse_gpu(options.gpu, overhead)


def _this_nodes(overhead_bytes: int | None) -> Gpu:
    """The smallest device that the driver has, without what it reserves for itself."""
    from gpumem_exporter.nvml.pynvml_provider import PynvmlProvider
    from gpumem_exporter.training.planning.devices import DEFAULT_OVERHEAD_BYTES, Gpu

    provider = PynvmlProvider()
    try:
        provider.open()
        devices = [(provider.read_memory(device.uuid), device.name) for device in provider.devices()]
    except NvmlError as error:
        raise ConfigurationError(f"--gpu says what to plan for, such as --gpu 80GiB; here, {error}") from error
    finally:
        provider.close()
    if not devices:
        raise ConfigurationError("--gpu says what to plan for, such as --gpu 80GiB; here is no device")
    memory, name = min(devices, key=lambda device: device[0].total_bytes)
    overhead = DEFAULT_OVERHEAD_BYTES if overhead_bytes is None else overhead_bytes
    return Gpu(name, memory.total_bytes, max(overhead, memory.reserved_bytes or 0))
