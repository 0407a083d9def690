"""What PatchEngine taps, in which order it asks, and what it leaves behind."""

import functools
import inspect
import sys
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from interception_core import (
    Interceptor,
    PatchEngine,
    UnknownNameError,
    loaded,
    primitive_names,
    untapped,
)
from interception_core.errors import TargetError
from jaxtap_testkit.strict import checking_leaks

pytestmark = pytest.mark.sample(2)

ENGINE = PatchEngine()
NO_JIT = PatchEngine(disable_jit=True)
ENGINES = pytest.mark.parametrize("engine", [ENGINE, NO_JIT], ids=["jit", "no jit"])


@pytest.fixture
def program(request):
    """A module of functions to tap, importable as ``program``."""
    module = types.ModuleType("program")
    source = """
def plain(x, y=2, *, z=3): return ("plain", x, y, z)
alias = plain

def countdown(n): return 0 if n == 0 else 1 + countdown(n - 1)
def even(n): return True if n == 0 else odd(n - 1)
def odd(n): return False if n == 0 else even(n - 1)

def make(k):
    def closure(x): return x + k
    return closure

closure = make(10)
held = [closure]

class Base:
    def method(self, x): return ("method", x)
    @classmethod
    def of(cls, x): return (cls.__name__, x)
    @staticmethod
    def free(x): return ("free", x)

class Child(Base):
    def method(self, x): return ("child", *super().method(x))

class Layer:
    def __init__(self, w): self.w = w
    def __call__(self, x): return x * self.w

layer, other = Layer(3), Layer(5)
constant = 7
"""
    exec(source, module.__dict__)
    sys.modules["program"] = module
    yield module
    del sys.modules["program"]


def record(log, result=NotImplemented):
    def handler(call, *args, **kwargs):
        log.append((call.op_name, args, kwargs))
        return result

    return handler


def wrap_result(tag):
    def handler(call, *args, **kwargs):
        return tag, call.proceed(*args, **kwargs)

    return handler


# --- what is tapped ---------------------------------------------------------------------------


def test_plain_function_and_its_aliases(program):
    before = program.alias
    log = []
    fn = ENGINE.wrap(
        lambda: (program.plain(1), program.alias(1, 5, z=6), before(2)),
        Interceptor({"program.plain": record(log, "tapped")}),
    )
    assert fn() == ("tapped",) * 3
    assert log == [
        ("plain", (1,), {}),
        ("plain", (1, 5), {"z": 6}),
        ("plain", (2,), {}),
    ]
    assert program.plain(1) == before(1) == ("plain", 1, 2, 3)


def test_proceed_uses_the_arguments_it_is_given(program):
    def handler(call, x, y=2, *, z=3):
        return call.proceed(x + 1, y=y + 1, z=z + 1)

    fn = ENGINE.wrap(lambda: program.plain(1), Interceptor({"program.plain": handler}))
    assert fn() == ("plain", 2, 3, 4)


def test_closure_and_its_aliases(program):
    interceptor = Interceptor({"program.closure": wrap_result("tapped")})
    fn = ENGINE.wrap(lambda: (program.closure(1), program.held[0](2)), interceptor)
    assert fn() == (("tapped", 11), ("tapped", 12))
    assert program.make(1)(1) == 2  # the same code, another function
    assert program.closure(1) == 11


def test_frames_of_a_tapped_closure_can_be_inspected(program):
    """Debuggers and test runners read f_locals of every frame."""
    seen = []

    def handler(call, x):
        frame = sys._getframe()
        while frame is not None:
            seen.append(dict(frame.f_locals))
            frame = frame.f_back
        return call.proceed(x)

    fn = ENGINE.wrap(lambda: program.closure(1), Interceptor({"program.closure": handler}))
    assert fn() == 11
    assert seen


def test_methods(program):
    interceptor = Interceptor(
        {
            "program.Base.method": wrap_result("tapped"),
            "program.Base.of": wrap_result("tapped"),
            "program.Base.free": wrap_result("tapped"),
        }
    )
    child = program.Child()
    bound = program.Base().method

    def body():
        return bound(1), child.method(2), program.Child.of(3), child.free(4)

    assert ENGINE.wrap(body, interceptor)() == (
        ("tapped", ("method", 1)),
        ("child", "tapped", ("method", 2)),
        ("tapped", ("Child", 3)),
        ("tapped", ("free", 4)),
    )
    assert body() == (("method", 1), ("child", "method", 2), ("Child", 3), ("free", 4))


def test_callable_instance_and_its_aliases(program):
    before = program.layer
    interceptor = Interceptor({"program.layer": wrap_result("tapped")})
    fn = ENGINE.wrap(lambda: (program.layer(1), before(2), program.other(1)), interceptor)
    assert fn() == (("tapped", 3), ("tapped", 6), 5)


@pytest.mark.slow
@ENGINES
def test_custom_jvp_function_and_its_aliases(engine):
    alias = jax.nn.relu
    fn = engine.wrap(
        lambda x: (jax.nn.relu(x), alias(x), jax.nn.relu6(x)),
        Interceptor({"jax.nn.relu": lambda call, x: call.proceed(x) + jnp.float32(1)}),
    )
    for run in (fn, jax.jit(fn)):
        first, second, sixth = run(jnp.float32(2))
        assert (first, second, sixth) == (3, 3, 2)
    assert jax.nn.relu(jnp.float32(2)) == 2


X = np.arange(6, dtype=np.float32).reshape(2, 3)
W = np.ones((3, 2), np.float32)


@ENGINES
def test_jitted_function_and_its_aliases(engine):
    """By attribute, by an alias in a closure or a container, and by the operator."""
    alias = jnp.matmul
    seen = []

    def handler(call, a, b, **kwargs):
        seen.append(call.op_name)
        return -call.proceed(a, b, **kwargs)

    def body(x, w):
        return jnp.matmul(x, w), [alias][0](x, w), x @ w, x.__matmul__(w)

    fn = engine.wrap(body, Interceptor({"jax.numpy.matmul": handler}))
    x, w = jnp.asarray(X), jnp.asarray(W)
    plain = body(x, w)
    for run in (fn, fn, jax.jit(fn)):
        for result, expected in zip(run(x, w), plain, strict=True):
            np.testing.assert_array_equal(result, -expected)
    assert set(seen) == {"matmul"}
    for result, expected in zip(body(x, w), plain, strict=True):
        np.testing.assert_array_equal(result, expected)


def test_every_attribute_call_of_a_jitted_function_is_seen_also_when_cached():
    seen = []

    def handler(call, a, b, **kwargs):
        seen.append(call.op_id)
        return NotImplemented

    def body(x, w):
        return jnp.dot(x, w) + jnp.dot(x, w) + x.dot(w)

    fn = ENGINE.wrap(body, Interceptor({"jax.numpy.dot": handler}))
    for _ in range(3):
        seen.clear()
        fn(jnp.asarray(X), jnp.asarray(W))
        assert seen == ["dot:0", "dot:1", "dot:2"]


def test_alias_of_a_jitted_function_is_seen_at_its_trace():
    """A held alias goes through JAX's own dispatch: the trace is tapped, and then reused."""
    alias = jnp.dot
    seen = []

    def handler(call, a, b, **kwargs):
        seen.append(call.op_id)
        return call.proceed(a, b, **kwargs) * jnp.float32(2)

    fn = ENGINE.wrap(lambda x, w: alias(x, w), Interceptor({"jax.numpy.dot": handler}))
    for _ in range(2):
        np.testing.assert_array_equal(fn(X, W), 2 * (X @ W))
    assert seen == ["jit(dot)/dot:0"]


def test_a_tapped_jitted_function_keeps_its_interface_for_bystanders():
    lowered = []

    def handler(call, *args, **kwargs):
        lowered.append(jnp.dot.lower(X, W).as_text())
        return NotImplemented

    ENGINE.wrap(lambda: jnp.dot(X, W), Interceptor({"jax.numpy.dot": handler}))()
    assert "dot_general" in lowered[0]


def test_signatures_stay_readable_while_tapped(program):
    plain, dot = inspect.signature(program.plain), inspect.signature(jnp.dot)
    seen = []

    def handler(call, *args, **kwargs):
        seen.append((inspect.signature(program.plain), inspect.signature(jnp.dot)))

    targets = {"program.plain": handler, "jax.numpy.dot": handler}
    ENGINE.wrap(lambda: program.plain(1), Interceptor(targets))()
    assert seen == [(plain, dot)]
    assert "__signature__" not in vars(program.plain)


def test_primitive():
    seen = []

    def handler(call, a, b, **params):
        seen.append((call.level, call.op_name, call.params["dimension_numbers"]))
        return call.proceed(a, b, **params) * np.float32(2)

    def body(x, w):
        return jnp.matmul(x, w) + jnp.einsum("ij,jk->ik", x, w)

    fn = NO_JIT.wrap(body, Interceptor({"primitive:dot_general": handler}))
    plain = body(X, W)
    for _ in range(2):
        seen.clear()
        np.testing.assert_array_equal(fn(X, W), 2 * plain)
        assert [entry[:2] for entry in seen] == [("primitive", "dot_general")] * 2
    np.testing.assert_array_equal(body(X, W), plain)
    assert "bind" not in vars(lax.dot_general_p)


def test_primitive_inside_scan_with_jit_off():
    def body(x, w):
        return lax.scan(lambda c, row: (c + 1, row @ w), 0, x)

    interceptor = Interceptor(
        {"primitive:dot_general": lambda call, *a, **k: call.proceed(*a, **k) * np.float32(2)}
    )
    count, rows = NO_JIT.wrap(body, interceptor)(jnp.asarray(X), jnp.asarray(W))
    np.testing.assert_array_equal(rows, 2 * (X @ W))
    assert count == 2


def test_scan_traces_its_body_once_with_jit_on():
    seen = []

    def handler(call, *args, **kwargs):
        seen.append(call.op_id)
        return NotImplemented

    def body(x, w):
        return lax.scan(lambda c, row: (c, jnp.dot(row, w)), 0, x)[1]

    fn = ENGINE.wrap(body, Interceptor({"jax.numpy.dot": handler}))
    np.testing.assert_array_equal(fn(jnp.asarray(X), jnp.asarray(W)), X @ W)
    assert seen == ["scan(<lambda>)/dot:0"]


def test_disable_jit_lasts_as_long_as_the_scope():
    inside = []
    interceptor = Interceptor({"jax.numpy.dot": record([])})
    NO_JIT.wrap(lambda: inside.append(jax.config.jax_disable_jit), interceptor)()
    ENGINE.wrap(lambda: inside.append(jax.config.jax_disable_jit), interceptor)()
    assert inside == [True, False]
    assert not jax.config.jax_disable_jit


@pytest.mark.slow
def test_flax_and_equinox_layers():
    import equinox as eqx
    from flax import linen, nnx

    def handler(call, *args, **kwargs):
        return call.proceed(*args, **kwargs) * jnp.float32(2)

    x = jnp.asarray(X)
    dense = linen.Dense(4)
    params = dense.init(jax.random.key(0), x)
    linear = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    mlp = eqx.nn.Linear(3, 4, use_bias=False, key=jax.random.key(0))
    cases = {
        "flax.linen.Dense.__call__": lambda: dense.apply(params, x),
        "flax.nnx.Linear.__call__": lambda: linear(x),
        "equinox.nn.Linear.__call__": lambda: jax.vmap(mlp)(x),
    }
    for target, body in cases.items():
        plain = body()
        tapped = ENGINE.wrap(body, Interceptor({target: handler}))
        np.testing.assert_array_equal(tapped(), 2 * plain)
        np.testing.assert_array_equal(body(), plain)


@pytest.mark.slow
def test_real_models_are_tapped_below_their_layers():
    import equinox as eqx
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(1, 4, (3, 3), rngs=rngs)
            self.attend = nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)
            self.head = nnx.Linear(4, 3, rngs=rngs)

        def __call__(self, x):
            h = nnx.relu(self.conv(x)).reshape(x.shape[0], -1, 4)
            return self.head(self.attend(h).mean(axis=1))

    seen = []

    def handler(call, *args, **kwargs):
        seen.append(call.op_name)
        return NotImplemented

    targets = ["jax.lax.conv_general_dilated", "jax.lax.dot_general", "jax.numpy.einsum"]
    interceptor = Interceptor(dict.fromkeys(targets, handler))
    net = Net(nnx.Rngs(0))
    image = jnp.ones((2, 4, 4, 1))
    plain = net(image)
    np.testing.assert_array_equal(ENGINE.wrap(lambda x: net(x), interceptor)(image), plain)
    assert seen.count("conv_general_dilated") == 1
    assert seen.count("dot_general") + seen.count("einsum") >= 7  # q, k, v, out, qk, av, head
    seen.clear()
    mlp = eqx.nn.MLP(3, 2, 8, 2, key=jax.random.key(0))
    batched = eqx.filter_jit(lambda x: jax.vmap(mlp)(x))
    plain = batched(X)
    tapped = ENGINE.wrap(batched, interceptor)(X)
    np.testing.assert_array_equal(tapped, plain)
    assert len(seen) >= 1


# --- who is asked, and what its own operations see ---------------------------------------------


def test_recursion_of_one_function(program):
    calls = []

    def handler(call, n):
        calls.append(n)
        return program.countdown(n)  # of the handler: not tapped, however deep

    fn = ENGINE.wrap(lambda: program.countdown(3), Interceptor({"program.countdown": handler}))
    assert fn() == 3
    assert calls == [3]


def test_recursion_through_two_functions(program):
    calls = []

    def handler(call, n):
        calls.append((call.op_name, n))
        return call.proceed(n)

    handlers = {"program.even": handler, "program.odd": handler}
    assert ENGINE.wrap(lambda: program.even(4), Interceptor(handlers))() is True
    assert calls == [("even", 4)]


def test_an_operation_inside_another_that_was_let_run_is_seen(program):
    calls = []

    def handler(call, n):
        calls.append((call.op_name, n))
        return NotImplemented

    handlers = {"program.even": handler, "program.odd": handler}
    assert ENGINE.wrap(lambda: program.even(4), Interceptor(handlers))() is True
    # Within even's own original, even is not shown again.
    assert calls == [("even", 4), ("odd", 3)]


def test_nested_interceptors_ask_the_inner_first(program):
    inner = Interceptor({"program.plain": wrap_result("inner")})
    outer = Interceptor({"program.plain": wrap_result("outer")})
    fn = ENGINE.wrap(ENGINE.wrap(lambda: program.plain(1), inner), outer)
    assert fn() == ("inner", ("outer", ("plain", 1, 2, 3)))


def test_nested_interceptors_that_call_each_other_end(program):
    def inner(call, n):
        return program.even(n)

    def outer(call, n):
        return program.odd(n) if call.op_name == "odd" else not program.odd(n)

    fn = ENGINE.wrap(
        ENGINE.wrap(lambda: program.odd(3), Interceptor({"program.odd": inner})),
        Interceptor({"program.even": outer, "program.odd": outer}),
    )
    assert fn() is False


def test_an_outer_interceptor_sees_what_the_inner_handler_does(program):
    seen = []
    inner = Interceptor({"program.plain": lambda call, x: program.closure(x)})
    outer = Interceptor({"program.closure": record(seen)})
    fn = ENGINE.wrap(ENGINE.wrap(lambda: program.plain(1), inner), outer)
    assert fn() == 11
    assert seen == [("closure", (1,), {})]


def test_an_inner_interceptor_sees_what_an_outer_one_lets_run(program):
    """``proceed`` of the outer handler runs the program's own operation."""
    inner = Interceptor({"program.Base.method": wrap_result("inner")})
    outer = Interceptor({"program.Child.method": lambda call, *args: call.proceed(*args)})
    fn = ENGINE.wrap(ENGINE.wrap(lambda: program.Child().method(1), inner), outer)
    assert fn() == ("child", "inner", ("method", 1))


def test_not_implemented_goes_on_to_the_outer_interceptor(program):
    inner = Interceptor({"program.plain": record([])})
    outer = Interceptor({"program.plain": wrap_result("outer")})
    fn = ENGINE.wrap(ENGINE.wrap(lambda: program.plain(1), inner), outer)
    assert fn() == ("outer", ("plain", 1, 2, 3))


def test_wrapping_twice_taps_once(program):
    interceptor = Interceptor({"program.plain": wrap_result("tapped")}, key="same")
    fn = ENGINE.wrap(ENGINE.wrap(lambda: program.plain(1), interceptor), interceptor)
    assert fn() == ("tapped", ("plain", 1, 2, 3))


def test_a_recursive_wrapped_function_taps_once(program):
    interceptor = Interceptor({"program.plain": wrap_result("tapped")})

    @functools.partial(ENGINE.wrap, interceptor=interceptor)
    def recursive(n):
        return program.plain(n) if n == 0 else recursive(n - 1)

    assert recursive(3) == ("tapped", ("plain", 0, 2, 3))


def test_untapped_functions_are_never_tapped(program):
    float_only = untapped(lambda: (program.plain(1), jax.jit(jnp.matmul)(X, W)))
    interceptor = Interceptor(
        {"program.plain": wrap_result("tapped"), "jax.numpy.matmul": record([], "tapped")}
    )
    assert program.plain(1) == float_only()[0]
    plain, product = ENGINE.wrap(float_only, interceptor)()
    assert plain == ("plain", 1, 2, 3)
    np.testing.assert_array_equal(product, X @ W)
    assert ENGINE.wrap(lambda: (float_only()[0], program.plain(1)), interceptor)() == (
        ("plain", 1, 2, 3),
        ("tapped", ("plain", 1, 2, 3)),
    )
    with pytest.raises(TargetError, match="must be a callable"):
        untapped(3)


# --- errors, and what is left behind ------------------------------------------------------------


class Unusual(BaseException):
    pass


@pytest.mark.parametrize(
    "error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit, StopIteration, Unusual]
)
@ENGINES
def test_exceptions_in_body_and_handler_restore_everything(program, engine, error):
    code = program.plain.__code__

    def fail(*_, **__):
        raise error

    body = engine.wrap(fail, Interceptor({"program.plain": record([])}))
    handler = engine.wrap(
        lambda: program.plain(1), Interceptor({"program.plain": fail, "jax.numpy.dot": fail})
    )
    dot = vars(jnp)["dot"]
    for fn in (body, handler):
        with pytest.raises(error):
            fn()
        assert program.plain.__code__ is code
        assert vars(jnp)["dot"] is dot
        assert not jax.config.jax_disable_jit
        assert program.plain(1) == ("plain", 1, 2, 3)


def test_exception_of_the_original_reaches_the_handler(program):
    def handler(call, *args):
        with pytest.raises(TypeError, match="unexpected"):
            call.proceed(*args, unexpected=1)
        return "handled"

    fn = ENGINE.wrap(lambda: program.plain(1), Interceptor({"program.plain": handler}))
    assert fn() == "handled"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("program.plian", "Did you mean 'program.plain'"),
        ("program.Base.methd", "Did you mean 'program.Base.method'"),
        ("jax.nmpy.dot", "Did you mean 'jax.numpy'"),
        ("porgram.plain", "Did you mean 'program'"),
    ],
)
def test_unknown_target(program, target, message):
    code = program.alias.__code__
    handlers = {"program.closure": record([]), target: record([])}
    with pytest.raises(UnknownNameError, match=message):
        ENGINE.wrap(lambda: None, Interceptor(handlers))()
    assert program.alias.__code__ is code
    assert program.closure(1) == 11


def test_unknown_primitive():
    with pytest.raises(UnknownNameError, match="Did you mean 'dot_general'"):
        NO_JIT.wrap(lambda: None, Interceptor({"primitive:dot_genral": record([])}))()


@pytest.mark.parametrize("target", ["program.constant", "program.Layer", "math.sin", "plain"])
def test_untappable_target(program, target):
    with pytest.raises(TargetError, match=r"Tap a Python function|dotted name"):
        ENGINE.wrap(lambda: None, Interceptor({target: record([])}))()


@pytest.mark.parametrize(
    "names",
    [
        ("program.plain", "program.alias"),
        ("jax.nn.silu", "jax.nn.swish"),
        ("program.Base.of", "program.Child.of"),
    ],
)
def test_two_names_of_one_function_are_refused(program, names):
    code = program.plain.__code__
    with pytest.raises(TargetError, match="same function under two names"):
        ENGINE.wrap(lambda: None, Interceptor({name: record([]) for name in names}))()
    assert program.plain.__code__ is code


def test_two_interceptors_may_use_different_names_of_one_function(program):
    inner = Interceptor({"program.plain": wrap_result("inner")})
    outer = Interceptor({"program.alias": wrap_result("outer")})
    fn = ENGINE.wrap(ENGINE.wrap(lambda: program.plain(1), inner), outer)
    assert fn() == ("inner", ("outer", ("plain", 1, 2, 3)))


def test_primitives_need_jit_off():
    with pytest.raises(TargetError, match="disable_jit=True"):
        ENGINE.wrap(lambda: None, Interceptor({"primitive:add": record([])}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({},), "non-empty"),
        (([],), "non-empty"),
        (({"": len},), "dotted name"),
        (({"primitive:": len},), "dotted name"),
        (({3: len},), "dotted name"),
        (({"a.b": 3},), "must be callable"),
        (({"a.b": len}, []), "must be hashable"),
    ],
)
def test_bad_interceptors(arguments, message):
    with pytest.raises(TargetError, match=message):
        Interceptor(*arguments)


def test_bad_arguments_of_wrap_and_engine():
    with pytest.raises(TargetError, match="callable"):
        ENGINE.wrap(3, Interceptor({"a.b": len}))
    with pytest.raises(TargetError, match="must be an Interceptor"):
        ENGINE.wrap(len, {"a.b": len})
    with pytest.raises(TypeError, match="disable_jit"):
        PatchEngine(disable_jit="yes")


def test_a_replaced_function_is_found_again(program):
    fn = ENGINE.wrap(
        lambda: program.plain(1), Interceptor({"program.plain": wrap_result("tapped")})
    )
    assert fn() == ("tapped", ("plain", 1, 2, 3))
    program.plain = lambda x: "new"
    assert fn() == ("tapped", "new")


def test_somebody_elses_patch_inside_the_scope_survives(program):
    class Holder:
        fn = staticmethod(jax.jit(lambda x: x))

    program.Holder = Holder

    def body():
        program.Holder.fn = "theirs"

    ENGINE.wrap(body, Interceptor({"program.Holder.fn": record([])}))()
    assert program.Holder.fn == "theirs"


# --- threads --------------------------------------------------------------------------------------


def _in_thread(fn):
    box = []
    thread = threading.Thread(target=lambda: box.append(fn()))
    thread.start()
    thread.join(timeout=60)
    return box[0]


def test_bystander_thread_runs_the_original(program):
    seen = []

    def body():
        return program.plain(1), _in_thread(lambda: program.plain(1))

    fn = ENGINE.wrap(body, Interceptor({"program.plain": record(seen, "tapped")}))
    assert fn() == ("tapped", ("plain", 1, 2, 3))
    assert len(seen) == 1


def test_same_interceptor_on_two_threads_leaves_in_any_order(program):
    code = program.plain.__code__
    interceptor = Interceptor({"program.plain": wrap_result("tapped")})
    started, leave = threading.Barrier(3), [threading.Event(), threading.Event()]
    results = [None, None]

    def body(i):
        started.wait(timeout=60)
        leave[i].wait(timeout=60)
        return program.plain(i)

    def work(i):
        results[i] = ENGINE.wrap(body, interceptor)(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    started.wait(timeout=60)
    for i in range(2):  # the first to enter is the first to leave
        assert program.plain.__code__ is not code
        leave[i].set()
        threads[i].join(timeout=60)
        assert results[i] == ("tapped", ("plain", i, 2, 3))
    assert program.plain.__code__ is code


def test_two_interceptors_leave_in_any_order(program):
    dot = vars(jnp)["dot"]
    interceptors = [Interceptor({"jax.numpy.dot": record([], f"tapped {i}")}) for i in range(2)]
    entered = [threading.Event(), threading.Event()]
    leave = [threading.Event(), threading.Event()]
    results = [None, None]

    def work(i):
        def body():
            entered[i].set()
            leave[i].wait(timeout=60)
            return jnp.dot(X, W)

        results[i] = ENGINE.wrap(body, interceptors[i])()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for i in range(2):
        threads[i].start()
        assert entered[i].wait(timeout=60)
    for i in range(2):
        leave[i].set()
        threads[i].join(timeout=60)
        assert results[i] == f"tapped {i}"
    assert vars(jnp)["dot"] is dot


def test_no_tracer_leaks():
    def handler(call, a, b, **kwargs):
        assert call.operands[0].shape == (2, 3)
        return call.proceed(a, b, **kwargs)

    with checking_leaks():
        fn = ENGINE.wrap(
            lambda x, w: jax.jit(lambda x: x @ w)(x).sum(),
            Interceptor({"jax.numpy.matmul": handler}),
        )
        jax.jit(jax.grad(fn))(jnp.asarray(X), jnp.asarray(W))


def test_what_is_loaded():
    assert loaded("jax.numpy.dot") is jax.numpy.dot
    assert loaded("jax.numpy.ndarray.sum") is jax.numpy.ndarray.sum
    assert loaded("jax.numpy.no_such_function") is None
    assert loaded("no_such_package.function") is None


def test_primitive_names_are_targets():
    names = primitive_names()
    assert {"dot_general", "conv_general_dilated", "add"} <= names
    assert "no_such_primitive" not in names
    seen = []
    engine = PatchEngine(disable_jit=True)
    handlers = {
        "primitive:add": lambda call, *args, **params: seen.append(call.op_id) or NotImplemented
    }
    engine.wrap(lambda x: x + x, Interceptor(handlers))(jnp.ones(2))
    assert seen == ["add:0"]


def test_a_handler_may_proceed_with_an_iterator():
    """It is read once: the next handler and the function have its items."""
    seen = []

    def inner(call, x, axes):
        return call.proceed(x, iter(axes))

    def outer(call, x, axes):
        seen.append(axes)
        return call.proceed(x, axes)

    target = "jax.numpy.transpose"
    tapped = ENGINE.wrap(
        ENGINE.wrap(lambda x: jnp.transpose(x, (1, 0)), Interceptor({target: inner})),
        Interceptor({target: outer}),
    )
    assert tapped(jnp.ones((2, 3))).shape == (3, 2)
    assert seen == [(1, 0)]


def test_operations_that_jax_transposes_are_linear():
    w, x = jnp.eye(3) * 2, jnp.ones(3)
    jitted = jax.jit(jnp.dot)

    @jax.custom_jvp
    def ruled(w, x):
        return jnp.sin(jnp.dot(w, x))

    @ruled.defjvp
    def _(primals, tangents):
        y = jnp.dot(*primals)
        return jnp.sin(y), jnp.cos(y) * jnp.dot(primals[0], tangents[1])

    def program(w, x):
        named = {
            "before": lambda: jitted(w, x),
            "transposed": lambda: jax.linear_transpose(lambda v: jitted(w, jnp.dot(w, v)), x)(x),
            "solved": lambda: lax.custom_linear_solve(
                lambda v: jitted(w, v), x, lambda matvec, b: b / 2, symmetric=True
            ),
            "ruled": lambda: jax.grad(lambda x: ruled(w, x).sum())(x),
            "after": lambda: jitted(w, x),
        }
        for name, run in named.items():
            with jax.named_scope(name):
                run()

    def note(call, *args, **kwargs):
        seen.setdefault(call.module_path.split("/")[0], []).append(call.is_linear(args[1]))
        return NotImplemented

    seen = {}
    ENGINE.wrap(program, Interceptor({"jax.numpy.dot": note}))(w, x)
    assert seen == {
        "before": [False],
        "transposed": [True, True],
        "solved": [True],
        "ruled": [False, True],
        "after": [False],
    }
