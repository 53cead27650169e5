"""Stages of ``selftest`` that run on every rank: networks, wrappers, checkpoints, features. One process a rank and stage."""
