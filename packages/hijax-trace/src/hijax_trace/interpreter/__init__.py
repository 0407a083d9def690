"""The trace engine: stage the program, then run it again, asking the handlers."""
