"""What a run is, whichever trainer it has, and what of its settings does not go together."""
