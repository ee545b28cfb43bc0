"""What surfaces show and what is true, in one form, so that tests can compare them."""
