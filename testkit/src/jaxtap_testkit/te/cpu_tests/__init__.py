"""The tests of te-ffi-kernels as modules, for te-ffi-kernels-cuda13.

They are beside te-ffi-kernels-cuda13 in a checkout alone, and in none of the two sdists.
"""

from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[5] / "packages" / "te-ffi-kernels" / "tests"
__path__ = [str(FOLDER)]
pytest.register_assert_rewrite(__name__)
