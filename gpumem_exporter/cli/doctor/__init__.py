"""The checks of `doctor`. Each is a function that yields findings and does not depend on the others."""
