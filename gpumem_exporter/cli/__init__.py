"""The commands, one file each. click and Rich are imported here only, and never by `run`."""
