"""Blocks, names and wrappers of any model."""
