"""The command ``jaxtap``, and how commands read programs."""

from .command_line import main
from .program import find_function, read_argument

__all__ = ["find_function", "main", "read_argument"]
