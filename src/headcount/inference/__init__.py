"""Predictions of a fitted model for a whole dataset, and what is made of them: evaluation, label issues, audits."""
