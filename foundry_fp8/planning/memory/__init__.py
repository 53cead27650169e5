"""Which checkpoints, compression and offload fit a model into a memory budget."""
