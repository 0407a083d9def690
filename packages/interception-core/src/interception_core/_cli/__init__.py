"""The command line ``jaxtap``."""
