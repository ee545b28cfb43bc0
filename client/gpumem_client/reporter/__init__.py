"""The reporter: one thread that sends samples to the exporter and runs its commands.

Other folders import: `delivery`, `planned_peak`, `report_loop`, `reporter`, `reporter_settings`.
"""
