"""Out-of-memory errors: their messages, and the observer that counts them."""
