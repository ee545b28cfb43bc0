"""Out-of-memory errors: each is recorded once, as an event, as a log line, and as the last error of its process."""
