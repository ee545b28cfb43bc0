"""The exporter's data model: samples, the store, the ledger and process names.

This package does no I/O, starts no threads and reads no clock.

Other folders import: `caller`, `container`, `event`, `ledger`, `naming`, `readings`, `recorders`, `samples`,
`history_series`, `shares`, `spelling`, `starting_engines`, `store`, `yaml_file`.
"""
