"""The interpreter: stages a program, then re-interprets it, asking the handlers."""
