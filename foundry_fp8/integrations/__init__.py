"""Trainers beside Composer, as adapters of :class:`foundry_fp8.run.fp8_run.FP8Run`. Each is imported by its own module alone."""
