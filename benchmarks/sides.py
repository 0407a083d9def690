"""The sides that are compared: each wraps a function with handlers in its own way."""

import statistics
import threading
import time
from contextlib import contextmanager

from qwix._src import interception as qwix_interception

from interception_core import Interceptor, PatchEngine


def _ours(fn, handlers):
    """With a handler of our kind made of one that takes only the call's own arguments."""

    def adapted(handler):
        return lambda call, *args, **kwargs: handler(call.proceed, *args, **kwargs)

    adapted_handlers = {name: adapted(handler) for name, handler in handlers.items()}
    # These handlers ignore the module path, as Qwix's cache keys do.
    interceptor = Interceptor(adapted_handlers, path_key=lambda path: None)
    return PatchEngine().wrap(fn, interceptor)


def _qwix(fn, handlers):
    """Qwix handlers call the original by its name: their interceptor is off meanwhile."""

    def adapted(name, handler):
        def proceed(*args, **kwargs):
            return qwix_interception.get_attribute(name)(*args, **kwargs)

        return lambda *args, **kwargs: handler(proceed, *args, **kwargs)

    mapping = {name: adapted(name, handler) for name, handler in handlers.items()}
    interceptor = qwix_interception.Interceptor(mapping=mapping, id=id(handlers))
    return qwix_interception.wrap_func_intercepted(fn, lambda: interceptor, disable_jit=False)


WRAPPERS = {"plain": lambda fn, handlers: fn, "jaxtap": _ours, "qwix": _qwix}


def compare(benchmark, make, *, rounds, unit, per=1, setup=lambda: None):
    """Times all sides in turn, round by round, so that they see the same machine.

    Args:
        benchmark: pytest-benchmark's fixture. It times whole rounds and keeps ``extra_info``.
        make: called with a side's wrapper; returns what is timed. It may return a value that
            has ``block_until_ready``, or its own time in seconds.
        rounds: how many, after one that isn't counted.
        unit: of the times in the report: "µs" or "ms".
        per: calls that one run of it makes; times are per call.
        setup: runs before each, not timed.
    """
    runs = {side: make(wrapper) for side, wrapper in WRAPPERS.items()}
    times = {side: [] for side in WRAPPERS}

    def one_round():
        for side, run in runs.items():
            setup()
            start = time.perf_counter()
            result = run()
            getattr(result, "block_until_ready", lambda: None)()
            elapsed = time.perf_counter() - start
            times[side].append((result if isinstance(result, float) else elapsed) / per)

    benchmark.pedantic(one_round, rounds=rounds, warmup_rounds=1)
    counted = {side: values[1:] for side, values in times.items()}
    benchmark.extra_info["unit"] = unit
    benchmark.extra_info["seconds"] = {
        side: statistics.median(values) for side, values in counted.items()
    }
    for other in ("plain", "qwix"):
        pairs = zip(counted["jaxtap"], counted[other], strict=True)
        benchmark.extra_info[f"jaxtap/{other}"] = statistics.median(a / b for a, b in pairs)


@contextmanager
def held_open(wrapped_with):
    """Another thread stays inside a scope meanwhile, waiting."""
    inside, leave = threading.Event(), threading.Event()

    def body():
        inside.set()
        leave.wait()

    thread = threading.Thread(target=wrapped_with(body))
    thread.start()
    inside.wait()
    try:
        yield
    finally:
        leave.set()
        thread.join()
