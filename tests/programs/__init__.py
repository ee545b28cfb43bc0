"""Programs that tests run in separate processes."""
