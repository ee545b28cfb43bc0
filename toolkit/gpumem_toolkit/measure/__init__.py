"""Phases, components, milestones and summaries of the memory of a training script.

Other folders import: `named_holders`, `tensor_bytes`.
"""
