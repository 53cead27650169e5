"""Trainers beside Composer: what a checkpoint of theirs has to hold, and what plugs into them. Each is imported by its own module alone."""
