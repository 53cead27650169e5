"""Adapters to other libraries: trainers (of :class:`~foundry_fp8.run.fp8_run.FP8Run`), LLM Foundry. Each is imported by its module."""
