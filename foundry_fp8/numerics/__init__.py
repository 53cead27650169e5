"""Number formats, recipes, and the reference quantisation that every kernel is held to. Pure torch."""
