"""Dataflow: how a program's values are computed from its inputs."""
