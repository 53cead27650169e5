"""Stages of ``selftest`` that run on every rank: networks and wrappers. One process a rank and stage."""
