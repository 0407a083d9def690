"""EngineConformance, put together from one class per part of the contract."""

from .errors import ErrorSuite
from .generated import GeneratedSuite
from .handlers import HandlerSuite
from .identity import IdentitySuite
from .isolation import IsolationSuite
from .kernels import KernelSuite
from .nesting import NestingSuite
from .operands import OperandSuite
from .primitives import PrimitiveSuite
from .threads import ThreadSuite
from .transformations import TransformationSuite


class EngineConformance(
    IsolationSuite,
    ThreadSuite,
    HandlerSuite,
    NestingSuite,
    TransformationSuite,
    IdentitySuite,
    OperandSuite,
    ErrorSuite,
    PrimitiveSuite,
    KernelSuite,
    GeneratedSuite,
):
    """The tests that every engine passes. Subclass it in a test module.

    ::

        class TestMyEngine(EngineConformance):
            engine = MyEngine()

    An engine may run a wrapped function as it is or trace it first. So no test depends on
    concrete values inside the wrapped function, on how often a handler runs, or on handlers that
    run again when nothing changed; a handler's result always has the shape and dtype of the
    original's.

    Attributes:
        engine: the engine under test.
        primitives: whether ``primitive:`` targets can be tapped. Otherwise they must be refused.
        disables_jit: whether wrapped functions run under ``jax.disable_jit``. Loops and branches
            on concrete values are then unrolled, and have other ids.
        labels_jit: whether operations in a jitted function of the program have its label in
            their id (``jit(block)/dot:0``). An engine that looks through ``jit`` has none.
        examples: how many generated programs to run.
    """
