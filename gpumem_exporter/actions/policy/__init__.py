"""Policies: rules that request actions by themselves.

Other folders import: `engine`, `rule_state`, `rules`, `values`.
"""
