"""The mathematics of majority labels: pure functions of probabilities, labels and bags, without models."""
