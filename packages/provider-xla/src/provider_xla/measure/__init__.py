"""Measure: run a program in float and look at each operation."""
