"""Softmax on a GPU: the tests of the CPU."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from on_gpu import marks

# isort: split
from test_softmax import *  # noqa: F403

pytestmark = marks
