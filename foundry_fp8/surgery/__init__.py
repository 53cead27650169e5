"""Which modules of a model become FP8, swapped how, and the report of it."""
