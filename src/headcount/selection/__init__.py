"""Choosing and fitting a model on bags whose instances have no labels."""
