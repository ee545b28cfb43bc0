"""The protocol and the HTTP client that reporters, the CLI and the exporter share. Standard library only."""
