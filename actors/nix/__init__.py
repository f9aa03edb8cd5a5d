"""What is spoken with Nix: its wire protocols, formats and hashes."""
