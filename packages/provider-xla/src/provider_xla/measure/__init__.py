"""Measuring: a program runs in float on data, and each operation is looked at."""
