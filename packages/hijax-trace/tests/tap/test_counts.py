"""How often handlers are asked, bodies traced, and how large the programs get."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxtap_testkit.programs import python_calls
from jaxtap_testkit.tap_helpers import Log, equations, look, stablehlo, tap, times

pytestmark = pytest.mark.sample(2)

DOT = "primitive:dot_general"
X = jnp.ones((2, 4))
WS = [jnp.eye(4) * i for i in range(12)]
MODES = pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jit"])


class Model:
    """Twelve layers of one jitted block, which counts how often it is traced."""

    def __init__(self, scoped=True):
        self.traces = 0
        self.scoped = scoped
        self.block = jax.jit(self._block)

    def _block(self, x, w):
        self.traces += 1
        return jnp.tanh(jnp.dot(x, w))

    def __call__(self, ws, x):
        for i, w in enumerate(ws):
            with jax.named_scope(f"layer_{i}" if self.scoped else "layers"):
                x = self.block(x, w)
        return x


class Count:
    """A handler that counts how often it is asked."""

    def __init__(self, then=lambda call: None, replace=False):
        self.asked = 0
        self._then = then
        self._replace = replace

    def __call__(self, call, *args, **params):
        self.asked += 1
        self._then(call)
        return call.proceed(*args, **params) * 2 if self._replace else NotImplemented


REPLACE = pytest.mark.parametrize("replace", [False, True])
TARGETS = pytest.mark.parametrize("target", [DOT, "jax.numpy.dot"])


@TARGETS
@REPLACE
@MODES
def test_equal_layers_are_asked_about_once(mode, replace, target):
    count, model = Count(replace=replace), Model()
    mode(tap(model, count, target))(WS, X)
    assert count.asked == 1


@TARGETS
@REPLACE
@MODES
def test_equal_layers_are_traced_once(mode, replace, target):
    model = Model()
    mode(tap(model, Count(replace=replace), target))(WS, X)
    assert model.traces == 1


@TARGETS
@MODES
@pytest.mark.parametrize("attribute", ["module_path", "op_id"])
def test_a_handler_that_reads_the_path_is_asked_for_each(mode, attribute, target):
    count, model = Count(lambda call: getattr(call, attribute)), Model()
    mode(tap(model, count, target))(WS, X)
    assert count.asked == 12
    assert model.traces == 1


@TARGETS
def test_a_handler_that_reads_the_path_where_there_is_one_path(target):
    count, model = Count(lambda call: call.module_path), Model(scoped=False)
    tap(model, count, target)(WS, X)
    assert count.asked == 1


@pytest.mark.slow
@TARGETS
def test_a_handler_that_reads_provenance_is_asked_for_each(target):
    count, model = Count(lambda call: call.operands), Model(scoped=False)
    tap(model, count, target)(WS, X)
    assert count.asked == 12
    assert model.traces == 1


@TARGETS
def test_a_handler_that_reads_one_operand(target):
    """The other one is what the layer before made, or an input, for the first layer."""

    def handler(call, x, w, **params):
        asked.append(call.provenance(x))
        return NotImplemented

    asked = []
    tap(Model(scoped=False), handler, target)(WS, X)
    assert asked == ["args[1]", None]


@TARGETS
@MODES
def test_path_key_of_two_classes(mode, target):
    def path_key(path):
        return path.startswith(("layer_1/", "layer_3")) or path in ("layer_1", "layer_3")

    paths, model = [], Model()
    count = Count(lambda call: paths.append(call.module_path))
    mode(tap(model, count, target, path_key=path_key))(WS, X)
    assert count.asked == 2
    assert paths == ["layer_0", "layer_1"]
    assert model.traces == 1


@TARGETS
def test_op_id_with_path_key(target):
    ids, model = [], Model()
    count = Count(lambda call: ids.append(call.op_id))
    tap(model, count, target, path_key=lambda path: None)(WS, X)
    assert count.asked == 1
    assert len(ids) == 1


@TARGETS
@REPLACE
def test_other_types_are_asked_about_anew(replace, target):
    count, model = Count(replace=replace), Model()
    fn = tap(model, count, target)
    fn(WS, X)
    fn(WS, jnp.ones((3, 4)))
    assert count.asked == 2
    assert model.traces == 2


@TARGETS
def test_second_call_without_jit_traces_no_block(target):
    count, model = Count(), Model()
    fn = tap(model, count, target)
    for _ in range(3):
        fn(WS, X)
    assert model.traces == 1
    assert count.asked == 1


@TARGETS
def test_second_call_of_a_jitted_one_does_nothing(target):
    count, model, outer = Count(), Model(), []

    def fn(ws, x):
        outer.append(1)
        return model(ws, x)

    jitted = jax.jit(tap(fn, count, target))
    for _ in range(3):
        jitted(WS, X)
    assert (len(outer), model.traces, count.asked) == (1, 1, 1)
    assert jitted._cache_size() == 1


@pytest.mark.slow
@TARGETS
def test_two_wrappers_with_equal_interceptors_share_the_trace_of_blocks(target):
    model, handler = Model(), times(2.0)
    for _ in range(2):
        jax.jit(tap(model, handler, target, key="shared"))(WS, X)
    assert model.traces == 1


@TARGETS
def test_other_interceptors_do_not_share(target):
    model = Model()
    first = tap(model, times(2.0), target, key=1)(WS, X)
    second = tap(model, times(3.0), target, key=2)(WS, X)
    plain = model(WS, X)
    assert model.traces == 3
    assert not jnp.array_equal(first, second) or not jnp.any(plain)


@pytest.mark.slow
@TARGETS
def test_wrapped_once_traced_under_jit_and_without(target):
    model = Model()
    fn = tap(model, look, target)
    fn(WS, X)
    jax.jit(fn)(WS, X)
    jax.jit(lambda ws, x: fn(ws, x) + 1)(WS, X)
    assert model.traces == 1


@TARGETS
@pytest.mark.parametrize("outer", ["grad", "vmap", "value"])
def test_under_outer_transformations(outer, target):
    count, model = Count(), Model()

    def loss(ws, x):
        return jnp.sum(tap(model, count, target)(ws, x))

    if outer == "grad":
        jax.jit(jax.grad(loss))(WS, X)
    elif outer == "vmap":
        jax.vmap(loss, (None, 0))(WS, X[None])
    else:
        loss(WS, X)
    assert count.asked == 1
    assert model.traces == 1


@pytest.mark.slow
@TARGETS
@REPLACE
def test_gradient_inside(replace, target):
    """Staged twice at most: the second time with handlers asked meanwhile."""
    count, model = Count(replace=replace), Model()

    def grad(ws, x):
        return jax.grad(lambda ws: jnp.sum(model(ws, x)))(ws)

    fn = tap(grad, count, target)
    fn(WS, X)
    assert model.traces <= 3
    traces = model.traces
    fn(WS, X)
    assert model.traces == traces


def programs():
    def scan(ws, x):
        return lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, jnp.stack(ws))[0]

    def remat(ws, x):
        block = jax.checkpoint(lambda x, w: jnp.tanh(jnp.dot(x, w)))
        return lax.scan(lambda c, w: (block(c, w), None), x, jnp.stack(ws))[0]

    def attention(ws, x):
        for w in ws[:3]:
            x = jax.nn.softmax(jnp.einsum("ij,kj->ik", x @ w, x)) @ x
        return jax.nn.gelu(x)

    return {"blocks": Model(), "scan": scan, "remat": remat, "attention": attention}


@pytest.mark.parametrize("name", programs())
@pytest.mark.parametrize("grad", ["none", "outside", "inside"])
class TestSize:
    TARGETS = ("jax.numpy.dot", "jax.numpy.einsum", "jax.nn.softmax", "jax.nn.gelu", DOT)

    def pair(self, name, grad):
        fn = programs()[name]
        if grad == "none":
            return fn, tap(fn, look, *self.TARGETS)
        loss = lambda ws, x: jnp.sum(fn(ws, x))  # noqa: E731
        if grad == "outside":
            return jax.grad(loss), jax.grad(tap(loss, look, *self.TARGETS))
        return jax.grad(loss), tap(jax.grad(loss), look, *self.TARGETS)

    @pytest.mark.slow
    def test_equations(self, name, grad):
        plain, tapped = (jax.make_jaxpr(fn)(WS, X) for fn in self.pair(name, grad))
        assert equations(tapped) == equations(plain)

    def test_length_of_stablehlo(self, name, grad):
        """A sum may be taken earlier in a gradient: what jit inlines is differentiated inlined."""
        plain, tapped = (stablehlo(fn, WS, X) for fn in self.pair(name, grad))
        assert len(tapped) == len(plain)


def test_replaced_layers_are_one_function_in_stablehlo():
    text = stablehlo(tap(Model(), times(2.0), DOT), WS, X)
    assert text.count("stablehlo.dot_general") == 1
    assert text.count("call @_block") == 12


def test_a_path_dependent_rule_makes_one_function_for_each_outcome():
    def handler(call, x, w, **params):
        return call.proceed(x, w, **params) * (2 if "1" in call.module_path else 3)

    fn = tap(Model(), handler, DOT, path_key=lambda path: "1" in path)
    assert stablehlo(fn, WS, X).count("stablehlo.dot_general") == 2


def test_body_of_scan_is_asked_about_once():
    count = Count(lambda call: call.op_id)
    fn = lambda ws, x: lax.scan(lambda c, w: (c @ w, None), x, ws)[0]  # noqa: E731
    tap(fn, count, DOT)(jnp.stack(WS), X)
    assert count.asked == 1


def test_branches_are_asked_about_one_by_one():
    count = Count()
    branches = [lambda x: lax.exp(x), lambda x: lax.exp(x) * 2, lambda x: x]
    tap(lambda i, x: lax.switch(i, branches, x), count, "primitive:exp")(jnp.int32(1), X)
    assert count.asked == 2


SMALL = {
    "products": (lambda x: jnp.exp(x) @ x.T + jnp.exp(x + 1) @ x.T, DOT, 2),
    "numpy functions": (lambda x: jnp.exp(jnp.exp(x)) + jnp.exp(x), "primitive:exp", 3),
    "operators": (lambda x: (x + x) * (x + x) + x, "primitive:add", 3),
    "lax": (lambda x: lax.exp(lax.exp(x)), "primitive:exp", 2),
}


@pytest.mark.parametrize("name", SMALL)
@MODES
def test_each_operation_is_shown_however_numpy_is_made(mode, name):
    """jax.numpy's functions are small jitted ones; a program doesn't know, nor do the ids."""
    fn, target, number = SMALL[name]
    count = Count()
    mode(tap(fn, count, target))(X)
    assert count.asked == number


@pytest.mark.parametrize("name", SMALL)
def test_ids_of_each_operation(name):
    fn, target, number = SMALL[name]
    for mode in (lambda f: f, jax.jit):
        log = Log()
        mode(tap(fn, log, target))(X)
        assert [i.split(":")[1] for i in log.ids] == [str(i) for i in range(number)]


@pytest.mark.parametrize("targets", [("jax.numpy.dot",), ("jax.nn.softmax", DOT)])
def test_staging_does_not_grow_with_calls(targets):
    """Wrapping and calling again and again leaves one program."""
    fn = tap(lambda x: jax.nn.softmax(jnp.dot(x, x.T)), look, *targets)
    sizes = {equations(jax.make_jaxpr(fn)(X)) for _ in range(3)}
    assert len(sizes) == 1


def test_questions_in_a_derivative_cost_the_same_for_each_layer():
    """Handlers are asked while it is staged: each question takes in what is new alone."""

    def is_weight(path):
        return path.startswith("args[0]")

    def look(call, x, w, **params):
        call.kind(x, is_weight)
        call.kind(w, is_weight)
        return NotImplemented

    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return x.sum()

    tapped = tap(jax.grad(loss), look, DOT)
    few, many = ([jnp.eye(4)] * n for n in (10, 80))
    jax.make_jaxpr(lambda *args: tapped(*args))(few, X)  # JAX's caches of small functions
    # A new function: JAX has traced the one before.
    calls = [python_calls(jax.make_jaxpr(lambda *args: tapped(*args)), ws, X) for ws in (few, many)]
    assert calls[1] < 1.3 * 8 * calls[0]


def _proceeds(call, *args, **params):
    return call.proceed(*args, **params)


@pytest.mark.parametrize(
    ("layer", "targets", "handler"),
    [
        (lambda x: x + x, ["primitive:add"], look),
        (lambda x: x + x, ["primitive:add"], _proceeds),
        (lambda x: x - jnp.mean(x), ["jax.numpy.mean", "primitive:reduce_sum"], _proceeds),
    ],
    ids=["left", "proceeded", "in a function"],
)
def test_what_handlers_do_not_change_is_differentiated_as_the_calls_that_it_is(
    layer, targets, handler
):
    """JAX keeps the derivative of a call, and finds that of an equation each time."""

    def fn(count, x):
        for _ in range(count):
            x = layer(x)
        return x.sum()

    def more(wrapped):
        """Calls of Python for 40 layers more."""
        found = []
        for count in (8, 48):
            run = functools.partial(wrapped, count)
            jax.make_jaxpr(lambda x: jax.grad(run)(x))(X)  # noqa: B023
            new = jax.make_jaxpr(lambda x: jax.grad(run)(x))  # noqa: B023
            found.append(python_calls(new, X))
        return found[1] - found[0]

    def tapped(count, x):
        return tap(functools.partial(fn, count), handler, *targets)(x)

    # Of equations it would be 1.9 and 2.4.
    assert more(tapped) < 1.65 * more(fn)
    text = str(jax.make_jaxpr(jax.grad(functools.partial(tapped, 2)))(X))
    assert text == str(jax.make_jaxpr(jax.grad(functools.partial(fn, 2)))(X))
