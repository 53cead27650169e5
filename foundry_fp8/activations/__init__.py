"""What is kept between forward and backward: checkpointing and compression."""
