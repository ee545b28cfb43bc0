"""Batch sizes, accumulation, checkpoints on disk and inference for training scripts.

Other folders import: `model_runs`.
"""
