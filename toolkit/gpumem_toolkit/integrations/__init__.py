"""Callbacks for trainers. Each module imports its library, which the user has installed.

Other folders import: nothing.
"""
