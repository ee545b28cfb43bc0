"""Compares variants of activation checkpointing by time and peak memory."""
