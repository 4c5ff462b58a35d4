"""The paper as cells: every printed number with the recipes that reproduce it."""
