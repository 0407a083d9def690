"""Dataflow: how the values of a program are computed from its inputs."""
