"""The click application: the commands of the core and of each feature, each imported when it is used.

A command's module has a function of the command's name, which is the click command.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from gpumem_client.wire.errors import ConfigurationError, ExporterUnreachableError
from gpumem_exporter import __version__
from gpumem_exporter.actions.kinds import KINDS
from gpumem_exporter.cli.program import COMPLETION_VARIABLE, EXPLAIN, GROUPS, LOOK, OPERATE, PROGRAM, RELEASE, Listed
from gpumem_exporter.cli.usage import CommandGroup, kube_forward, quiet_option, usage_text, use_exporter
from gpumem_exporter.features import features

if TYPE_CHECKING:
    from gpumem_exporter.cli.kube import Forward

_CLI = "gpumem_exporter.cli.commands"
_CORE = {
    "info": Listed(LOOK, "Show jobs, devices and where every byte is.", f"{_CLI}.node"),
    "top": Listed(LOOK, "Show findings, jobs and devices, live.", f"{_CLI}.node"),
    **{
        kind.command: Listed(RELEASE if kind.releases else EXPLAIN, kind.summary, f"{_CLI}.actions")
        for kind in KINDS.values()
        if kind.command
    },
    "report": Listed(EXPLAIN, "Show the memory of a job, even after it has ended.", f"{_CLI}.report"),
    "plan": Listed(EXPLAIN, "Predict the GPU memory of a training job before it runs.", f"{_CLI}.plan"),
    "serve": Listed(OPERATE, "Run the exporter.", "gpumem_exporter.serve_command"),
    "run": Listed(OPERATE, "Start a command with the reporter injected into it.", ""),
    "doctor": Listed(OPERATE, "Show what is wrong and how to fix it.", f"{_CLI}.doctor"),
    "release-nvml": Listed(OPERATE, "Release NVML for maintenance of the driver.", f"{_CLI}.actions"),
    "attach-nvml": Listed(OPERATE, "Attach NVML again after release-nvml.", f"{_CLI}.actions"),
    "help": Listed(OPERATE, "Show the help of a command.", ""),
}
_ALL = {
    **_CORE,
    **{
        command: listed._replace(module=f"gpumem_exporter.features.{name}.{listed.module}")
        for name, feature in features().items()
        for command, listed in feature.commands.items()
    },
}

COMMANDS = {name: listed for group in GROUPS for name, listed in _ALL.items() if listed.group == group}
"""By name, in the order of the help."""

_EXAMPLES = """\b
Examples:
  gpumem-exporter serve                               # on a node with GPUs
  gpumem-exporter serve --demo                        # anywhere: simulated devices and processes
  gpumem-exporter run -- python train.py              # report without a code change
  gpumem-exporter info                                # where every byte is
  gpumem-exporter top                                 # the same, live
  gpumem-exporter clear --gpu 0                       # release cached memory
  gpumem-exporter plan train:make_model --input 'float32[B,3,224,224]' --gpu 80GiB
  gpumem-exporter doctor                              # what is wrong and how to fix it
  gpumem-exporter --kube gpu-node-7                   # the page of a node of Kubernetes, until Ctrl-C
  gpumem-exporter --kube gpu-node-7 top

\b
Completion of commands, options and the names of jobs, in ~/.bashrc (or zsh_source in ~/.zshrc):
  eval "$(_GPUMEM_EXPORTER_COMPLETE=bash_source gpumem-exporter)"
In ~/.config/fish/config.fish:
  _GPUMEM_EXPORTER_COMPLETE=fish_source gpumem-exporter | source

\b
--kube runs `kubectl port-forward` to the pod with this name or on this node. GPUMEM_KUBECTL is the command
(kubectl), GPUMEM_KUBE_NAMESPACE the namespace (gpumem), GPUMEM_KUBE_SELECTOR the label of the exporters' pods
(app.kubernetes.io/name=gpumem-exporter).

\b
Exit codes: 0 done; 1 the request failed; 2 wrong usage or configuration.
"""


def invoke(words: Sequence[str]) -> int:
    """Run a command and return its exit code."""
    if instruction := os.environ.get(COMPLETION_VARIABLE):
        from gpumem_exporter.cli.completion import complete

        return complete(_application, instruction)
    try:
        # Not click's `main`, which writes to stderr on Ctrl-C.
        with _application.make_context(PROGRAM, list(words)) as context:
            try:
                return int(_application.invoke(context) or 0)
            except ExporterUnreachableError as error:
                forward = kube_forward()
                if forward is None or forward.failure in str(error):
                    raise
                raise ExporterUnreachableError(f"{error}; {forward.failure}") from None
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except click.UsageError as error:
        # click gives no context if the value of an option is missing.
        named = [word for word in words[:1] if word in COMMANDS]
        command = error.ctx.command_path if error.ctx else " ".join([PROGRAM, *named])
        raise ConfigurationError(f"{usage_text(error)}; see {command} --help".replace("?; ", "? ")) from error


class _Commands(CommandGroup):
    """Imports the module of a command when the command is looked up."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - the signature of click
        """Return the names in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - as above
        """Return a command; None if there is no such command."""
        if (listed := COMMANDS.get(cmd_name)) is None:
            return None
        if not listed.module:
            return click.Command(cmd_name, help=listed.summary)
        command: click.Command = getattr(importlib.import_module(listed.module), cmd_name.replace("-", "_"))
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - as above
        """Write the commands by what they are for."""
        width = max(map(len, COMMANDS))
        for group, names in groupby(COMMANDS, key=lambda name: COMMANDS[name].group):
            with formatter.section(group):
                formatter.write_dl([(name.ljust(width), COMMANDS[name].summary) for name in names])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the names of commands without importing them all; of options, if the word starts like one."""
        if incomplete.startswith("-"):
            return click.Command.shell_complete(self, ctx, incomplete)
        return [CompletionItem(name) for name in COMMANDS if name.startswith(incomplete)]


@click.group(
    cls=_Commands,
    epilog=_EXAMPLES,
    no_args_is_help=False,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, "-V", "--version", message="%(prog)s %(version)s")
@quiet_option
@click.option("--url", metavar="URL", callback=use_exporter, help="Use the exporter at this address.")
@click.option(
    "--kube",
    metavar="NODE|POD",
    callback=use_exporter,
    help="Use the exporter of a node of Kubernetes; without a command: its page.",
)
@click.pass_context
def _application(context: click.Context, url: str | None, kube: str | None) -> None:
    """Show where every byte of GPU memory is in PyTorch processes, and release it."""
    name, forward = context.invoked_subcommand, kube_forward()
    if name is None:
        if kube is None or forward is None:
            raise click.UsageError("Missing command.", context)
        _show_page(kube, forward)
    elif (url or forward) and not _uses_exporter(_application.get_command(context, name)):
        hint = "; use --instance-url http://{instance}" if name == "fleet" else ""
        given = "--kube" if forward else "--url"
        raise ConfigurationError(f"{given}: `{name}` uses no exporter of one node{hint}")


def _uses_exporter(command: click.Command | None) -> bool:
    """Return whether a command has the option --url, or one of its commands has it."""
    if isinstance(command, click.Group):
        return any(_uses_exporter(each) for each in command.commands.values())
    return command is not None and any(parameter.name == "url" for parameter in command.params)


def _show_page(target: str, forward: Forward) -> None:
    """Keep the port open until Ctrl-C, or until kubectl ends."""
    url = forward.url
    with contextlib.suppress(KeyboardInterrupt):
        print(f"The page of {target}: {url}/  (Ctrl-C ends)", flush=True)
        forward.wait()
        raise ExporterUnreachableError(forward.failure)
