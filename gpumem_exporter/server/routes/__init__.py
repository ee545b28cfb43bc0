"""The routes, one subject a module."""
