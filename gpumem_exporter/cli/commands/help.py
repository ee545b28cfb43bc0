"""`help`: the help of a command. This entry is for the list of commands: `main` reads `help COMMAND` as `--help`."""

from __future__ import annotations

import click

help = click.Command("help", help="Show the help of a command.")  # noqa: A001 - the name of the command
