"""`run`: the client's `gpumem-run`. This entry is for the help: the console script calls the client without click."""

from __future__ import annotations

import click

from gpumem_client.run import SUMMARY

run = click.Command("run", help=SUMMARY)
