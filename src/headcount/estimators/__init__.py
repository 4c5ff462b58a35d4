"""The scikit-learn interface: a classifier of instances and folds of whole bags."""
