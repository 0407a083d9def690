"""The suite of all engines, for TraceEngine."""

import pytest

from hijax_trace import TraceEngine
from interception_core.testing import EngineConformance

pytestmark = pytest.mark.sample(3)


class TestTraceEngine(EngineConformance):
    engine = TraceEngine()
    primitives = True
    # A gradient around a tap around another gradient may sum in another order: some 2 of 300.
    reorders_sums = True
