"""Commands that take a function in a file, its arguments and rules; these names are public."""

from .options import check_folders as check_folders
from .options import check_has as check_has
from .options import configure as configure
from .options import make_plan as make_plan
from .options import told as told
from .options import write_whole as write_whole
from .options import written as written

__all__ = [
    "check_folders",
    "check_has",
    "configure",
    "make_plan",
    "told",
    "write_whole",
    "written",
]
