"""What works on high-level types and Boxes: in JAX itself, and in hijax-trace.

Each behaviour is a function of an API, which is JAX's own or ours, and passes or raises. Run as a
script it prints the state of this JAX: a line per behaviour, and what failed.
"""

import importlib.util
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import hijax

import hijax_trace

# ruff: noqa: E731

SAMPLES = Path(importlib.util.find_spec("jaxtap_testkit.hijax_samples").origin)
X = np.array([1.0, 2.0, 3.0], np.float32)
M = np.stack([X, X - 5])
SECTIONS: dict[str, dict] = {}


def section(title):
    rows = SECTIONS.setdefault(title, {})

    def behaviour(name):
        return lambda f: rows.setdefault(name, f)

    return behaviour


def _samples(names):
    """Returns the sample types of the tests on other base classes."""
    text = SAMPLES.read_text().replace("import hijax_trace as ht\n", "")
    module = types.ModuleType("samples")
    module.ht = names
    exec(compile(text.replace("from __future__", "#"), str(SAMPLES), "exec"), module.__dict__)
    return vars(module)


class Api:
    """The names of one implementation; what it lacks raises AttributeError."""

    def __init__(self, **names):
        self.__dict__.update(names)


def ours():
    public = [name for name in hijax_trace.__all__ if name != "TraceEngine"]
    names = {name: getattr(hijax_trace, name) for name in public}
    return Api(is_ours=True, **names, **_samples(hijax_trace))


def jax_own():
    missing = (None, None)
    names = {
        "HiType": hijax.HiType,
        "HiPspec": hijax.HiPspec,
        "MappingSpec": hijax.MappingSpec,
        "HiPrim": getattr(hijax, "HiPrim", None) or hijax.VJPHiPrimitive,
        "register_hitype": hijax.register_hitype,
        "linearize_from_jvp": getattr(hijax, "linearize_from_jvp", missing),
    }
    optional = ("Box", "HiPrimitive", "vjp_from_jvp", "vmap_rule")
    found = {n: getattr(hijax, n) for n in optional if hasattr(hijax, n)}
    if "Box" in found:
        changed = lambda t: [v for v in t.jaxpr.jaxpr.invars if v.final_qdd != v.initial_qdd]
        found["mut_types"] = changed
    return Api(
        **{**names, **found, "jit": jax.jit, "is_ours": False},
        **_samples(types.SimpleNamespace(**names)),
    )


def equal(actual, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), actual, expected)


def raises(f, *words):
    """Checks that ``f`` raises, and that the message has these words."""
    message = None
    try:
        f()
    except Exception as error:
        message = str(error)
    assert message is not None, "no error"
    assert all(word in message for word in words), message


def roundtrip(api):
    return lambda x: api.dequantize(api.quantize(x))


def expected(api):
    return np.asarray(roundtrip(api)(M))


hi = section("Immutable types")


@hi("jit: argument, result, closed over")
def _(api):
    q = jax.jit(api.quantize)(M)
    equal(jax.jit(lambda p: api.dequantize(p) + api.dequantize(q))(q), 2 * expected(api))


@hi("grad through, grad with respect to a value")
def _(api):
    equal(jax.jit(jax.grad(lambda x: (roundtrip(api)(x) * x).sum()))(M), M + expected(api))
    equal(jax.grad(lambda q: (api.dequantize(q) ** 2).sum())(api.quantize(M)), 2 * expected(api))


@hi("jvp")
def _(api):
    equal(jax.jvp(roundtrip(api), (M,), (M,))[1], M)


@hi("linearize with a derived rule")
def _(api):
    equal(jax.linearize(roundtrip(api), M)[1](M), M)


@hi("vmap, with a spec")
def _(api):
    f = jax.vmap(lambda q: q, in_axes=api.Rows(), out_axes=api.Rows(), axis_size=2)
    equal(api.dequantize(f(api.quantize(np.stack([M, M])))), np.stack([expected(api)] * 2))


@hi("vmap of jit of a type without ndim")
def _(api):
    f = jax.vmap(jax.jit(lambda q: q), in_axes=api.Rows(), out_axes=api.Rows(), axis_size=2)
    f(api.quantize(np.stack([M, M])))


@hi("scan: carry, xs and ys")
def _(api):
    body = lambda c, q: (c, api.quantize(api.dequantize(q) + api.dequantize(c)))
    q = api.quantize(np.stack([M, M]))
    ys = jax.jit(lambda q: lax.scan(body, api.quantize(M), q, length=2)[1])(q)
    assert jax.typeof(ys) == jax.typeof(q)


@hi("while")
def _(api):
    f = lambda q: lax.while_loop(
        lambda q: api.dequantize(q).sum() > -50, lambda q: api.quantize(api.dequantize(q) * 2), q
    )
    jax.jit(f)(api.quantize(M - 1))


@hi("cond")
def _(api):
    f = lambda q: lax.cond(True, lambda q: q, lambda q: api.quantize(-api.dequantize(q)), q)
    equal(api.dequantize(jax.jit(f)(api.quantize(M))), expected(api))


@hi("remat")
def _(api):
    f = jax.checkpoint(lambda x: (roundtrip(api)(x) * x).sum())
    equal(jax.jit(jax.grad(f))(M), M + expected(api))


@hi("remat of a scan")
def _(api):
    body = lambda c, _: (roundtrip(api)(c), None)
    f = jax.checkpoint(lambda x: lax.scan(body, x, None, length=2)[0].sum())
    equal(jax.jit(jax.grad(f))(M), np.ones_like(M))


@hi("custom_vjp with hi residuals and results")
def _(api):
    f = jax.custom_vjp(lambda x: api.quantize(x))
    f.defvjp(lambda x: (api.quantize(x), api.quantize(x)), lambda q, g: (g + api.dequantize(q),))
    equal(jax.jit(jax.grad(lambda x: api.dequantize(f(x)).sum()))(M), 1 + expected(api))


@hi("shard_map")
def _(api):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = api.RowsP("d")
    f = jax.shard_map(lambda q: q, mesh=mesh, in_specs=spec, out_specs=spec)
    equal(api.dequantize(jax.jit(f)(api.quantize(M))), expected(api))


@hi("jax.tree, donation, eval_shape, ahead-of-time compilation")
def _(api):
    q = api.quantize(M)
    assert jax.tree.leaves([q])[0] is q
    assert jax.eval_shape(api.quantize, M) == jax.typeof(q)
    jax.jit(lambda q: q).lower(q).compile()(q)
    jax.jit(lambda q: api.quantize(api.dequantize(q)), donate_argnums=0)(q)
    assert q.values.is_deleted()


@hi("jax.export of a program with hi values inside")
def _(api):
    import jax.export

    equal(jax.export.export(jax.jit(roundtrip(api)))(M).call(M), expected(api))


@hi("references (jax.new_ref) to hi values")
def _(api):
    ref = jax.new_ref(api.quantize(M))
    jax.jit(lambda: ref.__setitem__(..., api.quantize(api.dequantize(ref[...]) * 2)))()
    equal(api.dequantize(ref[...]), 2 * expected(api))


@hi("a missing method is named, with the transformation")
def _(api):
    class Bare(api.HiType):
        pass

    raises(lambda: Bare().dec_rank(1, None), "vmap requires Bare to implement the `dec_rank`")


ops = section("Operations")


@ops("HiPrimitive: lowered at once outside, kept in a jaxpr, which is high")
def _(api):
    class Double(api.HiPrimitive):
        def is_high(self, *avals, by):
            return by != 1

        def abstract_eval(self, x, *, by):
            return x, set()

        def to_lojax(self, x, *, by):
            return x * by

    double = Double("double")
    equal(double.bind(X, by=2), 2 * X)
    assert jax.make_jaxpr(lambda x: double.bind(x, by=2))(X).is_high
    assert not jax.make_jaxpr(lambda x: double.bind(x, by=1))(X).is_high
    equal(jax.jit(lambda x: double.bind(x, by=2))(X), 2 * X)


@ops("HiPrimitive whose is_high is False for its parameters, evaluated")
def _(api):
    class Same(api.HiPrimitive):
        def is_high(self, *avals):
            return False

        def abstract_eval(self, x):
            return x, set()

        def to_lojax(self, x):
            return x

    same = Same("same")
    equal(jax.jit(lambda x: same.bind(x))(X), X)
    equal(same.bind(X), X)


@ops("HiPrimitive: vmap by a method")
def _(api):
    class Same(api.HiPrimitive):
        def abstract_eval(self, x):
            return x, set()

        def to_lojax(self, x):
            return x

        def batch(self, axis_data, args, dims):
            return self.bind(*args), dims[0]

    same = Same("same")
    equal(jax.vmap(lambda x: same.bind(x))(M), M)


def _cube(api, **rules):
    def __init__(self, aval):
        self.in_avals, self.out_aval, self.params = (aval,), aval, {}
        api.HiPrim.__init__(self)

    methods = {"__init__": __init__, "expand": lambda self, x: x**3, **rules}
    cls = type("Cube", (api.HiPrim,), methods)
    return lambda x: cls(jax.typeof(x))(x)


@ops("HiPrim: reverse mode derived from jvp")
def _(api):
    forward, backward = api.vjp_from_jvp
    jvp = lambda self, primals, ts: (self(*primals), 3 * primals[0] ** 2 * ts[0])
    f = _cube(api, jvp=jvp, vjp_fwd=forward, vjp_bwd_retval=backward)
    equal(jax.grad(lambda x: f(x).sum())(X), 3 * X**2)


@ops("HiPrim: `batch(axis_data, args, dims)` written with `vmap_rule`")
def _(api):
    batch = lambda self, data, args, dims: (api.vmap_rule(data, self.expand, dims, 0)(*args), 0)
    equal(jax.vmap(_cube(api, batch=batch))(M), M**3)


@ops("HiPrim: `dce(used_outs, live_ins)`")
def _(api):
    seen = []

    def dce(self, used_outs, live_ins):
        seen.append(live_ins)
        return True, True, self

    rules = {"dce": dce, "jvp": lambda self, xs, ts: (self(*xs), 3 * xs[0] ** 2 * ts[0])}
    cube = _cube(api, **rules)
    f = jax.checkpoint(lambda x: jnp.sin(cube(x)).sum())
    jax.jit(lambda x: jax.linearize(f, x)[1](x))(X)
    assert seen


@ops("is_high, requires_low, lower under public names")
def _(api):
    jaxpr = jax.make_jaxpr(roundtrip(api))(M)
    assert api.is_high(jaxpr)
    assert not api.is_high(api.lower(jaxpr))
    assert api.requires_low()


boxes = section("Box")


@boxes("a Box under a public name")
def _(api):
    import jax.experimental.hijax as public

    assert hasattr(public, "Box") or api.is_ours


@boxes("get and set outside of traces; pytree contents; changes of type")
def _(api):
    box = api.Box(None)
    for value in (1.0, {"a": X}, None):
        box.set(value)
        equal(box.get(), value)


@boxes("jit: closed over, passed, in a pytree, made inside")
def _(api):
    box = api.Box(1.0)

    def f(b, x):
        inner = api.Box(x)
        inner.set(inner.get() * 2)
        box.set(box.get() + inner.get())
        b["b"].set(box.get())

    other = api.Box(0.0)
    jax.jit(f)({"b": other}, 3.0)
    equal([box.get(), other.get()], [7.0, 7.0])


@boxes("a type-changing set under jit (ours: hijax_trace.jit)")
def _(api):
    box, closed = api.Box(None), api.Box(None)

    def f(b, x):
        b.set([x, x])
        closed.set({"x": x})

    api.jit(f)(box, 2.0)
    equal([box.get(), closed.get()], [[2.0, 2.0], {"x": 2.0}])


@boxes("the changed types can be asked for")
def _(api):
    assert len(api.mut_types(api.jit(lambda b: b.set([1.0])).trace(api.Box(1.0)))) == 1


@boxes("nested jits that change a type")
def _(api):
    box = api.Box([])

    def f():
        g = api.jit(lambda: box.set([*box.get(), 1.0]))
        g()
        g()

    api.jit(f)()
    equal(box.get(), [1.0, 1.0])


@boxes("contents of hi types")
def _(api):
    box = api.Box([api.quantize(M), 1.0])
    jax.jit(lambda: box.set([api.quantize(api.dequantize(box.get()[0]) * 2), 2.0]))()
    equal(api.dequantize(box.get()[0]), 2 * expected(api))


def _plumbing(api, wrap):
    box = api.Box(0.0)
    f = jax.custom_vjp(lambda box, x: x)
    f.defvjp(lambda box, x: (x, box), lambda box, g: (box.set(g), (None, g))[1])
    program = wrap(lambda box, x: 2 * f(box, 2 * x))
    jax.grad(lambda x: program(box, x))(1.0)
    equal(box.get(), 2.0)


@boxes("grad: the backward pass gets the Box by reference")
def _(api):
    _plumbing(api, lambda f: f)


@boxes("grad of jit: the same")
def _(api):
    _plumbing(api, jax.jit)


@boxes("jit of grad: the same")
def _(api):
    box = api.Box(0.0)
    f = jax.custom_vjp(lambda box, x: x)
    f.defvjp(lambda box, x: (x, box), lambda box, g: (box.set(g), (None, g))[1])
    jax.jit(jax.grad(lambda x: 2 * f(box, 2 * x)))(1.0)
    equal(box.get(), 2.0)


@boxes("a set beside what is differentiated, with stop_gradient")
def _(api):
    box = api.Box(0.0)
    f = lambda x: (box.set(lax.stop_gradient(x)), x * x)[1]
    equal([jax.grad(f)(3.0), jax.grad(jax.jit(f))(4.0), box.get()], [6.0, 8.0, 4.0])


@boxes("differentiating through a Box made inside")
def _(api):
    def f(x):
        box = api.Box(x)
        box.set(box.get() * x)
        return box.get()

    equal(jax.grad(jax.jit(f))(3.0), 6.0)


@boxes("jvp with a Box as tangent")
def _(api):
    box, tangent = api.Box(5.0), api.Box(1.0)
    f = jax.jit(lambda box, x: (box.set(box.get() + x), x)[1])
    jax.jvp(f, (box, 2.0), (tangent, 1.0))
    equal([box.get(), tangent.get()], [7.0, 2.0])


@boxes("scan, closed over")
def _(api):
    box = api.Box(1.0)
    body = lambda c, _: (box.set(box.get() * 2), (c, None))[1]
    jax.jit(lambda: lax.scan(body, 0, None, length=3)[0])()
    equal(box.get(), 8.0)


@boxes("scan over a Box")
def _(api):
    box = api.Box(X)
    body = lambda c, b: (b.set(b.get() * 2), (c, None))[1]
    lax.scan(body, 0, box, length=3)
    equal(box.get(), 2 * X)


@boxes("while")
def _(api):
    box = api.Box(1.0)
    body = lambda i: (box.set(box.get() * 2), i + 1)[1]
    jax.jit(lambda: lax.while_loop(lambda i: i < 3, body, 0))()
    equal(box.get(), 8.0)


@boxes("grad of a while loop that writes")
def _(api):
    box = api.Box(1.0)

    def f(x):
        body = lambda i: (box.set(box.get() + lax.stop_gradient(x)), i + 1)[1]
        lax.while_loop(lambda i: i < 3, body, 0)
        return x

    jax.grad(f)(1.0)
    equal(box.get(), 4.0)


@boxes("cond, closed over and as operand")
def _(api):
    box, other = api.Box(1.0), api.Box(1.0)
    yes = lambda b: (box.set(box.get() + 1), b.set(b.get() + 2))[1]
    jax.jit(lambda p: lax.cond(p, yes, lambda b: None, other))(True)
    equal([box.get(), other.get()], [2.0, 3.0])


@boxes("remat, read and written")
def _(api):
    box = api.Box(2.0)
    f = jax.checkpoint(lambda x: (box.set(box.get()), jnp.sin(x * box.get()))[1])
    equal(jax.grad(jax.jit(f))(1.0), 2 * np.cos(2.0))


@boxes("vmap: made inside, shared and read, mapped")
def _(api):
    box, mapped = api.Box(2.0), api.Box(X)

    def f(b, x):
        inner = api.Box(x)
        b.set(inner.get() * box.get())
        return b.get()

    equal(jax.vmap(f)(mapped, X), 2 * X)
    equal(mapped.get(), 2 * X)


@boxes("shard_map, passed")
def _(api):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    box = api.Box(jax.device_put(X, jax.NamedSharding(mesh, jax.P("d"))))
    f = lambda b, x: (b.set(b.get() + x), x)[1]
    spec = jax.P("d")
    jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(spec, spec), out_specs=spec))(box, X)
    equal(box.get(), 2 * X)


@boxes("shard_map, closed over")
def _(api):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    box = api.Box(2.0)
    f = lambda x: x * box.get()
    equal(jax.jit(jax.shard_map(f, mesh=mesh, in_specs=jax.P(), out_specs=jax.P()))(X), 2 * X)


@boxes("ahead-of-time compilation")
def _(api):
    box = api.Box(1.0)
    compiled = jax.jit(lambda b: b.set(b.get() + 1)).lower(box).compile()
    compiled(box)
    equal(box.get(), 2.0)


@boxes("jax.export of a program that uses one")
def _(api):
    import jax.export

    box = api.Box(1.0)
    jax.export.export(jax.jit(lambda x: x + box.get()))(X)


@boxes("aliases as two arguments (ours: hijax_trace.jit)")
def _(api):
    box = api.Box(1.0)
    api.jit(lambda a, b: (a.set(a.get() + 1), b.set(b.get() + 1)))(box, box)
    equal(box.get(), 3.0)


@boxes("closed over and passed as well (ours: hijax_trace.jit)")
def _(api):
    box = api.Box(1.0)
    api.jit(lambda b: (box.set(box.get() + 1), b.set(b.get() * 10)))(box)
    equal(box.get(), 20.0)


@boxes("returned from jit (ours: hijax_trace.jit)")
def _(api):
    equal(api.jit(lambda x: api.Box(x))(1.0).get(), 1.0)


@boxes("as a carry")
def _(api):
    lax.scan(lambda b, _: (b, None), api.Box(1.0), None, length=2)


@boxes("jax.tree.map(lambda x: x, box) is the same Box")
def _(api):
    box = api.Box({"a": X})
    assert jax.tree.map(lambda x: x, box) is box


says = section("Errors that say what to do")


@says("a change of type in a loop")
def _(api):
    box = api.Box([1.0])
    body = lambda i: (box.set(1.0), i + 1)[1]
    raises(lambda: lax.while_loop(lambda i: i < 3, body, 0), "type", "before the loop")


@says("a change of type under plain jit")
def _(api):
    box = api.Box(1.0)
    raises(lambda: jax.jit(lambda: box.set(None))(), "hijax_trace.jit")


@says("differentiating through set, closed over")
def _(api):
    box = api.Box(1.0)
    f = lambda x: (box.set(x), x)[1]
    raises(lambda: jax.grad(f)(1.0), "stop_gradient")
    raises(lambda: jax.grad(jax.jit(f))(1.0), "stop_gradient")


@says("differentiating through set, passed to plain jit")
def _(api):
    f = jax.jit(lambda x, box: (box.set(x), x)[1])
    raises(lambda: jax.grad(f)(1.0, api.Box(1.0)), "stop_gradient")


@says("a mapped value in a shared Box")
def _(api):
    box = api.Box(1.0)
    raises(lambda: jax.vmap(jax.jit(lambda x: box.set(x)))(X), "in_axes")


@says("a Box that escaped its trace")
def _(api):
    kept = []
    jax.jit(lambda x: kept.append(api.Box(x)))(1.0)
    raises(lambda: kept[0].get(), "Box", "eturn")


@says("closed over by a function under shard_map")
def _(api):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    box = api.Box(1.0)
    f = jax.shard_map(lambda x: x + box.get(), mesh=mesh, in_specs=jax.P(), out_specs=jax.P())
    raises(lambda: jax.jit(f)(X), "Box", "in_specs")


def state(api):
    """Returns per behaviour None, or the exception."""
    found = {}
    for title, rows in SECTIONS.items():
        for name, check in rows.items():
            try:
                check(api)
            except Exception as error:
                found[title, name] = error
            else:
                found[title, name] = None
    return found


def main():
    own = state(jax_own())  # before hijax-trace is used for the first time
    mine = state(ours())
    for key, error in own.items():
        print("\t".join([*key, "no" if error else "yes", "no" if mine[key] else "yes"]))
        for who, e in (("jax", error), ("ours", mine[key])):
            if e is not None:
                print(f"    {who}: {type(e).__name__}: {str(e).partition(chr(10))[0][:150]}")


if __name__ == "__main__":
    main()
