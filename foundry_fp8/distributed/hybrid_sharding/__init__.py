"""HSDP: how many ranks shard, how many replicate, and the mesh for it."""
