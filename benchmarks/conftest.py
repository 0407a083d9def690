"""Benchmarks are compiled as for users, again each time."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items):
    """Mark benchmarks ``optimized``: tests are compiled without XLA's expensive passes."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.optimized)
