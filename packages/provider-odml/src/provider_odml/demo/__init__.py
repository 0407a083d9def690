"""``jaxtap demo-odml``: a small model trained for the device, exported, and run in LiteRT."""

from .command import run

__all__ = ["run"]
