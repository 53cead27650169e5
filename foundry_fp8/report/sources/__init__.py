"""What runs can be read from: one file a kind, each with ``find`` (in a folder) and ``read``."""
