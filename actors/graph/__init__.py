"""Graphs of derivations: reading the files that people submit, checking and ordering them."""
