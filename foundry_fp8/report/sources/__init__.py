"""What runs can be read from: one file a kind, each with ``read``."""
