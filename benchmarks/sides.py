"""The sides that are compared: each wraps a function with handlers in its own way."""

import threading
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
