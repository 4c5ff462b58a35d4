"""Labelled data sets and the protocol that turns them into majority-labelled bags."""
