"""Choosing a method by cross-validation and fitting it, on bags whose instances have no labels."""
