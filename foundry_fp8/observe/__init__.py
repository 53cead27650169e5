"""What a running model shows: operand health, kurtosis, FLOPs."""
