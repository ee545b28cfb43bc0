"""Clearing the cache and releasing models."""
