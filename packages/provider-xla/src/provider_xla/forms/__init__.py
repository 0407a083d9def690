"""Stored forms of parameters that hold another form, and forms among the leaves of a tree."""
