"""FLOPs of a decoder, peaks of a device, and what their ratio means. Imports torch alone."""
