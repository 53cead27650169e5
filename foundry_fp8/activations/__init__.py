"""What a model keeps between forward and backward: measuring it, packing it, and recomputing from packed inputs."""
