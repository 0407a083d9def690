"""Commands: ``jaxtap plan`` and ``jaxtap report``."""
