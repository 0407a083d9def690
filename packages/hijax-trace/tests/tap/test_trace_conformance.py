"""The suite of all engines, for TraceEngine."""

from hijax_trace import TraceEngine
from interception_core.testing import EngineConformance


class TestTraceEngine(EngineConformance):
    engine = TraceEngine()
    primitives = True
