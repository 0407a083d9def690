"""The suite of all engines, for TraceEngine."""

import pytest

from hijax_trace import TraceEngine
from jaxtap_testkit.conformance import ConformanceWithFlags, TieredConformance
from jaxtap_testkit.tiers import count

pytestmark = pytest.mark.sample(2)


class TestTraceEngine(TieredConformance):
    engine = TraceEngine()
    primitives = True
    examples = count(110)


class TestTraceEngineWithFlags(ConformanceWithFlags):
    engine = TraceEngine()
    primitives = True
    examples = count(110)
