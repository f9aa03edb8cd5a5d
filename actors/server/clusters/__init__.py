"""Cluster jobs on the server: groups of jobs that start together, or not at all."""
