"""What is asked of a fitted model: predictions, evaluation, label issues, audits."""
