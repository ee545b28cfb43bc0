"""Policies: rules that ask for actions by themselves."""
