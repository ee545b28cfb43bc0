"""Hooks into torch and the interpreter, and the boundary that keeps the client's errors from the user's code."""
