"""The reporter: one thread that sends samples to the exporter and runs its commands."""
