"""Recipes, runs, records and studies: the side of the researcher."""
