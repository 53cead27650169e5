"""Gradients and parameters compressed under DDP, FSDP1 and FSDP2."""
