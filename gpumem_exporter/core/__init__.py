"""What the exporter knows and what follows from it: samples, the store, the ledger.

Pure: no I/O, no threads, no clock.
"""
