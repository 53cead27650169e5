"""What communication costs at scale: machines, one training step on them, published points, and measured constants."""
