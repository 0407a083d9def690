"""The command ``jaxtap``, and how commands of plugins read the programs that they are given."""

from .command_line import main
from .program import find_function, read_argument

__all__ = ["find_function", "main", "read_argument"]
