"""The reporter: one thread that sends samples to the exporter and runs its commands.

Other folders import: `delivery`, `loop`, `plan`, `reporter`, `settings`.
"""
