"""Policies: rules that request actions by themselves.

Other folders import: `policy_values`.
"""
