"""``python -m interception_core``: the same as ``jaxtap``."""

import sys

from ._cli.main import main

sys.exit(main())
