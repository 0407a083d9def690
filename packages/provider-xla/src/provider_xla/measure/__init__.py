"""Measure: run a program in float on data and look at each operation."""
