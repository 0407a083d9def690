"""Lists the operations of a program, for people to read."""
