"""``python -m interception_core``: the same as ``jaxtap``."""

import sys

from .cli import main

sys.exit(main())
