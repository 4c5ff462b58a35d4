"""What bags let one expect before any training."""
