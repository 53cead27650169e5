"""``foundry-fp8 selftest``: the first contact with a GPU, in stages that survive each other's failure."""

from foundry_fp8.cli.selftest.command import selftest

__all__ = ["selftest"]
