"""Phases, components, milestones and summaries of the memory of a training script."""
