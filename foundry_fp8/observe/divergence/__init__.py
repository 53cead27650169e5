"""Alarm signals, and the precision ladder that the guard moves layers on."""
