"""What backward needs, in host memory until shortly before it does."""
