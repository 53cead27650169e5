"""The divergence guard: when to measure what FP8 does, and what to do about it. Needs torch alone."""
