"""Policies: rules that request actions by themselves."""
