"""Policies: rules that request actions by themselves.

Other folders import: `alerts`, `evaluation`, `policy_route`, `policy_rules`, `policy_runner`, `policy_values`.
"""
