"""Completion in bash and zsh: of commands and options by click, and of names by the running exporter.

The shell runs the program with `_GPUMEM_EXPORTER_COMPLETE` at each tab. Nothing but the completions is ever printed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import click
from click.shell_completion import BashComplete, CompletionItem, ShellComplete, ZshComplete, split_arg_string

from gpumem_client.wire.errors import ConfigurationError
from gpumem_exporter.cli.program import COMPLETION_VARIABLE, PROGRAM

# The timeout of the exporter at a tab.
_ANSWER_SECONDS = 1.0
_LIVE = "/api/v1/live"
_BASH = r"""
%(complete_func)s() {
    local line=${COMP_LINE:0:COMP_POINT} type value
    # readline replaces only what follows the last of these characters, such as the colon of a pid or of a MIG device.
    # An at sign is replaced, too.
    local breaks=${COMP_WORDBREAKS//[[:space:]\"\']/} word=${line##*[[:space:]]}
    local kept=${word%%"${word##*[$breaks]}"}
    kept=${kept%%@}
    COMPREPLY=()
    while IFS=, read -r type value; do
        case $type in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            plain)
                value=${value#"$kept"}
                # Another user may have named a job `$(...)`.
                [[ $value == *[!A-Za-z0-9_.,:@=/+%%-]* ]] && printf -v value %%q "$value"
                COMPREPLY+=("$value")
                ;;
        esac
    done < <(COMP_WORDS=$line %(complete_var)s=bash_complete "$1" 2>/dev/null)
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""
# The body of an autoloaded function. The script of click 8 completes nothing at the second tab of a shell: it then only
# registers a function.
_ZSH = r"""#compdef %(prog_name)s
local -a names described
local type value help
local -x COMP_WORDS="${words[*]}" COMP_CWORD=$((CURRENT-1)) %(complete_var)s=zsh_complete
for type value help in "${(@f)$($words[1] 2>/dev/null)}"; do
    case $type in
        dir) _path_files -/ ;;
        file) _path_files -f ;;
        plain) if [[ $help == _ ]]; then names+=("$value"); else described+=("$value:$help"); fi ;;
    esac
done
(( $#described )) && _describe -V unsorted described -U
(( $#names )) && compadd -U -V unsorted -a names
(( compstate[nmatches] ))
"""

Document = Mapping[str, Any]
Completion = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


class _Bash(BashComplete):
    """The completion of bash, whose own words end at each colon and at sign; so this one reads the line."""

    source_template = _BASH

    def get_completion_args(self) -> tuple[list[str], str]:
        line = os.environ["COMP_WORDS"]
        words = [*split_arg_string(line)[1:], *([""] if line[-1:].isspace() else [])]
        return words[:-1], words[-1]


class _Zsh(ZshComplete):
    source_template = _ZSH


_SHELLS: Mapping[str, type[ShellComplete]] = {"bash": _Bash, "zsh": _Zsh}


def complete(application: click.Command, instruction: str) -> int:
    """Print completions, or the script for a shell, and return the exit code."""
    shell, _, what = instruction.partition("_")
    kind = _SHELLS.get(shell)
    if kind is None or what not in ("source", "complete"):
        return 1
    completion = kind(application, {}, PROGRAM, COMPLETION_VARIABLE)
    with contextlib.suppress(Exception):  # a half-typed line is no error
        print(completion.source() if what == "source" else completion.complete())
    return 0


def install(shell: str, environ: Mapping[str, str] = os.environ) -> str:
    """Write the script of a shell into the user's folder, and return what is left to do, as text for people."""
    name = Path(shell or environ.get("SHELL", "")).name
    home = Path(environ.get("HOME") or "~").expanduser()
    if name == "bash":
        data = Path(environ.get("XDG_DATA_HOME") or home / ".local" / "share")
        path = data / "bash-completion" / "completions" / PROGRAM
        then = f"Start a new shell. Without the package bash-completion, add to ~/.bashrc: source {path}"
    elif name == "zsh":
        path = home / ".zfunc" / f"_{PROGRAM}"
        then = "Add to ~/.zshrc, if it is missing: fpath+=~/.zfunc; autoload -Uz compinit; compinit"
    else:
        raise ConfigurationError(f"--install-completion: the shell is {name or 'unknown'!r}; give bash or zsh")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_SHELLS[name](click.Command(PROGRAM), {}, PROGRAM, COMPLETION_VARIABLE).source() + "\n")
    except OSError as error:
        raise ConfigurationError(f"--install-completion: {path}: {error.strerror}") from error
    return f"Wrote {path}. {then}"


def of_list(known: Iterable[str], incomplete: str) -> list[CompletionItem]:
    """Return the completions of the last name of a list with commas."""
    before, comma, last = incomplete.rpartition(",")
    given = before.split(",")
    return [CompletionItem(f"{before}{comma}{name}") for name in known if name.startswith(last) and name not in given]


def _names(path: str, found: Callable[[Document], Iterable[object]]) -> Completion:
    """Return the completion of names that a document of the exporter has."""

    def shell_complete(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
        try:
            names = dict.fromkeys(str(name) for name in found(_read(context, path)) if name not in (None, ""))
            known = [name for name in names if name.isprintable()]
        except Exception:  # noqa: BLE001 - a tab has no place for an error
            return []
        return of_list(known, incomplete)

    return shell_complete


def _read(context: click.Context, path: str) -> Document:
    from gpumem_exporter.cli.api_client import ExporterApi
    from gpumem_exporter.cli.options import action_token, exporter_urls

    values = context.params
    token = action_token(values.get("token_file"))
    with ExporterApi(exporter_urls(values.get("url")), token=token, timeout_seconds=_ANSWER_SECONDS) as api:
        return api.get(path)


def _of_processes(name: str) -> Completion:
    return _names(_LIVE, lambda live: (process.get(name) for job in live["jobs"] for process in job["processes"]))


SELECTORS = {
    "gpu": _names(_LIVE, lambda live: (device["gpu"] for device in live["devices"])),
    "uuid": _names(_LIVE, lambda live: (device["uuid"] for device in live["devices"])),
    **{name: _of_processes(name) for name in ("pid", "workload", "rank", "user")},
}
"""The completion of each option that selects processes."""
JOBS = _names(_LIVE, lambda live: (job.get("workload") or job["id"] for job in live["jobs"]))
PROFILE_IDS = _names("/api/v1/profiles", lambda document: (each["id"][:8] for each in document["profiles"]))
ACTION_IDS = _names("/api/v1/actions?dry_run=false", lambda document: (each["id"][:8] for each in document["actions"]))
