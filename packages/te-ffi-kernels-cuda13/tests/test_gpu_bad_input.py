"""Bad input to quantization on a GPU: the tests of the CPU."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from on_gpu import marks

# isort: split
from test_bad_input import (  # noqa: F401
    test_dequantize,
    test_only_the_blocks_that_are_wanted,
    test_quantize,
    test_quantize_numbers,
    test_quantize_target,
)

pytestmark = marks
