"""The protocol and the HTTP client that reporters, the CLI and the exporter share. Standard library only.

Other folders import: `errors`, `http`, `nvml_processes`, `peer`, `procfs`, `protocol`, `reason_codes`, `trust`,
`units`.
"""
