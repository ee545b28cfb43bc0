"""The commands, one file each. Typer and Rich are imported here only, and never by `run` or `--version`."""
