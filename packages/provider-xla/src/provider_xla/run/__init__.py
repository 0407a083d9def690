"""Running: providers, and a program with stored parameters."""
