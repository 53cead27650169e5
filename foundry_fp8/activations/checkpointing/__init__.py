"""Activation checkpointing of chosen modules of any model."""
