"""What is kept between forward and backward in fewer bits, or computed again."""
