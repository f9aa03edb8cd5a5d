"""What runs the jobs: the interface and its implementations."""
