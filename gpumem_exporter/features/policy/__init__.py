"""Policies: rules that request actions by themselves.

Other folders import: `evaluation`, `policy_values`.
"""
