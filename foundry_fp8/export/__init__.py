"""Checkpoints to serve: the weights of a converted model as the FP8 numbers that it multiplies with."""
