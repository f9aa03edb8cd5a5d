"""Nix's own formats and protocols: what a worker, an evaluation and the hook speak to Nix."""
