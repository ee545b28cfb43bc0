"""Policies: rules that request actions by themselves.

Other folders import: `engine`, `rules`, `values`.
"""
