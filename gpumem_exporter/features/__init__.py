"""The capabilities above the core, a folder each, which owns everything that the capability adds."""
