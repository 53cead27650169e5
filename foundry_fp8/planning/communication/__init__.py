"""What communication costs at scale: machines, one training step on them, and measured constants."""
