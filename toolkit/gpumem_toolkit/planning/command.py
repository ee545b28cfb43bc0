"""`gpumem-plan`: batch size, gradient accumulation and memory of a job before it runs."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, BooleanOptionalAction, Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any, NoReturn

from gpumem_client.wire.errors import ConfigurationError
from gpumem_toolkit.planning.configuration import apply, backup_of, diff, parse_map, planned_text
from gpumem_toolkit.planning.devices import parse_bytes, parse_gpu, smallest_gpu
from gpumem_toolkit.planning.job import Description, parse_value
from gpumem_toolkit.planning.plan import Plan
from gpumem_toolkit.planning.planner import plan
from gpumem_toolkit.planning.planner_process import TIMEOUT_SECONDS

_DESCRIPTION = """\
Predict the GPU memory of a training job before it runs.

Builds the model in a separate process and simulates a few training steps, which needs no GPU and
almost no memory. The tensors have no values; a model of PyTorch's allocator places them. --profile
measures on a GPU instead. MODEL is a callable MODULE:FACTORY, whose result may be a LightningModule or
a pair of it and its Trainer; or a model of transformers: its config.json, its folder, or its id in the
local cache. TrainingArguments may follow after --, as a script takes them. Without a model, describe a
transformer by its dimensions.

Exit code 1: the batch does not fit on the first GPU.
"""

_EXAMPLES = """\
Examples:
  %(prog)s train:make_model --input 'float32[B,3,224,224]' --target 'int64[B]' \\
      --optimizer adamw --precision bf16 --gpu 80GiB --target-effective-batch 512
  %(prog)s ./llama --sequence 4096 --gpu h100-80gb,rtx4090 --training-arguments arguments.json
  %(prog)s ./llama --sequence 4096 --gpu 24GiB -- --per_device_train_batch_size 4 --bf16
  %(prog)s --layers 32 --hidden 4096 --sequence 4096 --parameters 7e9 --precision pure-bf16 --gpu h200
  %(prog)s train:make_model --input 'int64[B,1024]' --gpu h100-80gb --batch 8 --accumulation 2
  %(prog)s train:make_model --input 'int64[B,1024]' --profile --batch 4
  %(prog)s train:make_model --input 'float32[B,256]' --gpu 24GiB \\
      --apply config.yaml --map train.batch_size=batch --map train.accumulation=accumulation
  %(prog)s train:make_model --input 'float32[B,256]' --gpu 24GiB --json > plan.json
  gpumem-run --plan plan.json -- python train.py    # exports the error of the plan
"""

# The values of a plan that `--map` assigns to keys.
_PLANNED = ("batch", "accumulation", "effective_batch")
# The options that are not arguments of `plan`.
_OWN = (
    *("model", "script", "layers", "hidden", "parameters", "vocabulary", "gpu", "overhead"),
    *("apply", "map", "dry_run", "json", "help"),
)
# Ended by Ctrl-C: 128 plus the number of the signal, as in a shell.
_INTERRUPTED = 130


def main(words: Sequence[str] | None = None, program: str = "gpumem-plan") -> int:
    """Run the command and return its exit code: 0, 1 (the job does not fit), or 2 with one line on standard error."""
    try:
        parser, words = _parser(program), list(sys.argv[1:] if words is None else words)
        end = words.index("--") if "--" in words else len(words)
        options = parser.parse_args(words[:end], Namespace(script=words[end + 1 :], vocabulary=32000))
        if options.help:
            parser.print_help()
            return 0
        return _plan_and_apply(options)
    except ConfigurationError as error:
        print(f"{program}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return _INTERRUPTED


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{message}; see {self.prog} --help")


def _parser(program: str) -> ArgumentParser:
    parser = _Parser(
        program,
        usage="%(prog)s [OPTIONS] [MODEL] [-- TRAINING ARGUMENTS]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=partial(RawDescriptionHelpFormatter, max_help_position=34, width=100),
        add_help=False,
        allow_abbrev=False,
    )

    # Options that are not given are None, and `plan` has their defaults.
    def flag(name: str, text: str, *names: str) -> None:
        parser.add_argument(*names, name, action="store_true", default=None, help=text)

    def value(name: str, text: str, kind: type = str, default: Any = None, metavar: str = "", **settings: Any) -> None:
        shown = text if default is None else f"{text}  [default: {default}]"
        parser.add_argument(name, help=shown, type=kind, metavar=metavar or f"<{kind.__name__}>", **settings)

    several = partial(value, action="append")
    parser.add_argument("model", nargs="?", metavar="MODEL", help="MODULE:FACTORY, or a config of transformers.")
    several("--input", "An argument of the model: float32[B,3,224,224].", metavar="TENSOR", dest="inputs")
    several("--target", "An argument of the loss after the output: int64[B].", metavar="TENSOR", dest="targets")
    value("--loss", "auto, cross_entropy, mse, mean, sum, output, or MODULE:FUNCTION.", default="auto")
    value(
        "--optimizer", "An optimizer of torch.optim such as adamw, adamw8bit, none, or MODULE:FACTORY.", default="adamw"
    )
    several("--optimizer-option", "Such as fused=true or momentum=0.9.", metavar="NAME=VALUE", dest="optimizer_options")
    value("--precision", "fp32; bf16 or fp16 (autocast); pure-bf16 or pure-fp16.", default="fp32")
    value("--attention", "auto, flash, efficient, math or cudnn.", default="auto")
    value("--convolution", "cudnn, or native if cuDNN is off.", default="cudnn")
    flag("--checkpointing", "Recompute the repeated blocks.")
    loops = (
        "script: out = model(...); out.loss.backward(); trainer: the output is dropped before backward; lightning: the "
        "gradients also stay until the next backward."
    )
    value("--loop", loops, default="script")
    value("--training-arguments", "TrainingArguments of a config of transformers, as JSON.", metavar="FILE")
    value("--layers", "Without a model: number of transformer blocks.", int)
    value("--hidden", "Without a model: width of the transformer.", int)
    value("--sequence", "Tokens of one sample.", int)
    value("--parameters", "Number of parameters: 7e9.", float)
    value("--vocabulary", "Number of different tokens.", int, 32000)
    several("--gpu", "80GiB, h100-80gb, ...; several with commas. Default: this node's smallest GPU.", metavar="GPU")
    value("--overhead", "Memory of context and driver. Default: 1152MiB.", metavar="SIZE")
    value("--margin", "Part of the free memory that the plan uses.", float, 0.85)
    value("--target-effective-batch", "Samples in one optimizer step over all devices.", int)
    batches = "Plan this batch size instead of the largest. With --profile: the larger batch size measured, default 8."
    value("--batch", batches, int)
    value("--accumulation", "Backward passes before each step of the optimizer.", int, 1)
    value("--devices", "Data-parallel processes.", int, 1)
    value("--multiple-of", "Batch sizes are multiples of this number.", int, 1)
    changes = "Also plan changes that save memory; takes longer.  [default: changes]"
    parser.add_argument("--changes", action=BooleanOptionalAction, help=changes)
    flag("--profile", "Measure two steps on this machine's first GPU.")
    value("--timeout", "Time limit of the plan.", float, TIMEOUT_SECONDS, "SECONDS", dest="timeout_seconds")
    several("--apply", "Write the plan into a .yaml or .toml file; keeps FILE.backup.", Path, metavar="FILE")
    several("--map", "The key that receives batch, accumulation or effective_batch.", metavar="KEY=VALUE")
    flag("--dry-run", "With --apply: show the change, write nothing.")
    flag("--json", "Print JSON, sizes in bytes.")
    flag("--help", "Show this message and exit.", "-h")
    return parser


def _plan_and_apply(options: Namespace) -> int:
    if bool(options.apply) != bool(options.map):
        raise ConfigurationError("--apply FILE and --map KEY=VALUE must be used together")
    # Planning can take minutes: first check that the files can be changed.
    _planned_texts(options, dict.fromkeys(_PLANNED, 1))
    planned = _plan(options)
    print(json.dumps(planned.as_dict(), indent=2) if options.json else planned)
    if not planned.fits:
        return 1
    # With --json, standard output has only the JSON document.
    _change_files(options, planned, sys.stderr if options.json else sys.stdout)
    return 0


def _plan(options: Namespace) -> Plan:
    given = {name: value for name, value in vars(options).items() if value is not None and name not in _OWN}
    if options.script:
        if options.training_arguments:
            raise ConfigurationError("give TrainingArguments either after -- or with --training-arguments")
        given["training_arguments"] = options.script
    if options.optimizer_options:
        given["optimizer_options"] = dict(map(_named_value, options.optimizer_options))
    model = options.model
    if model is None:
        sizes = options.layers, options.hidden, given.pop("sequence", None)
        if None in sizes:
            raise ConfigurationError("use MODULE:FACTORY, or describe a transformer: --layers, --hidden and --sequence")
        parameters = None if options.parameters is None else int(options.parameters)
        model = Description(*sizes, parameters, options.vocabulary)
    elif options.layers or options.parameters:
        raise ConfigurationError("use either a model or --layers and --parameters, not both")
    gpus = [parse_gpu(name) for text in options.gpu or () for name in text.split(",")] or [smallest_gpu()]
    if options.overhead is not None:
        gpus = [replace(gpu, overhead_bytes=parse_bytes(options.overhead)) for gpu in gpus]
    return plan(model, gpu=gpus, **given)


def _change_files(options: Namespace, planned: Plan, output: IO[str]) -> None:
    """Print the changes of each file. Write the files after all of them have been checked."""
    texts = _planned_texts(options, {name: getattr(planned, name) for name in _PLANNED})
    for path, before, after in texts:
        print(diff(path, before, after) or f"{path} already has these values\n", end="", file=output)
    for path, before, after in () if options.dry_run else texts:
        if before != after:
            apply(path, before, after)
            print(f"changed {path}; the previous version is {backup_of(path)}", file=output)


def _planned_texts(options: Namespace, planned: Mapping[str, int]) -> list[tuple[Path, str, str]]:
    """Return the path of each file and its text before and after the change."""
    values = parse_map(options.map or (), planned)
    return [(path, *planned_text(path, values)) for path in options.apply or ()]


def _named_value(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise ConfigurationError(f"invalid --optimizer-option {text!r}: write NAME=VALUE, such as momentum=0.9")
    return name, parse_value(value)
