"""Out-of-memory errors: observed, explained, and turned into advice."""
