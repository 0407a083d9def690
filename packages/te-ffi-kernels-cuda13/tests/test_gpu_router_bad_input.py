"""Bad input to the router on a GPU: the tests of the CPU."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from on_gpu import marks

# isort: split
from test_router_bad_input import *  # noqa: F403

pytestmark = marks
