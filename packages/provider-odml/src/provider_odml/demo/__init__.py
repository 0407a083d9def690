"""``jaxtap demo-odml``: a small model trained for the device, exported, and run in LiteRT."""

from .command import configure, run

__all__ = ["configure", "run"]
