"""What activation checkpointing costs and gives: each way of it, run once and measured."""
