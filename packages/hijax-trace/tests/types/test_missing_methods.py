"""A type or primitive that lacks a method says which, and for what, on every version of JAX."""

import itertools
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax

import hijax_trace as ht
from jaxtap_testkit.hijax_samples import f32

pytestmark = pytest.mark.sample(2)

X = np.arange(6, dtype=np.float32).reshape(2, 3)
METHODS = {
    "lo_ty": lambda self: [f32(*self.shape)],
    "lower_val": lambda self, value: [value.array],
    "raise_val": lambda self, array: self.box(array),
    "to_tangent_aval": lambda self: f32(*self.shape),
    "dec_rank": lambda self, size, spec: type(self)(self.shape[1:], self.box),
    "inc_rank": lambda self, size, spec: type(self)((size, *self.shape), self.box),
    "leading_axis_spec": lambda self: Leading(),
    "shard": lambda self, mesh, manual_axes, check_vma, spec: self,
    "unshard": lambda self, mesh, check_vma, spec: self,
}
NAMES = itertools.count()


@dataclass(frozen=True)
class Leading(ht.MappingSpec):
    pass


@dataclass(frozen=True)
class WholeP(ht.HiPspec):
    def to_lo(self):
        return (jax.P(),)


def make(without, tangent=None):
    """Returns a value of a new hi type that lacks the methods in ``without``."""

    @dataclass(frozen=True)
    class Value:
        array: Any

    @dataclass(frozen=True)
    class WrapTy(ht.HiType):
        shape: tuple
        box: type

    for name, method in METHODS.items():
        if name not in without:
            setattr(WrapTy, name, method)
    if tangent is not None:
        WrapTy.to_tangent_aval = tangent
    ht.register_hitype(Value, lambda v: WrapTy(v.array.shape, Value))
    return Value(X)


class Unwrap(ht.HiPrim):
    def __init__(self, aval):
        self.in_avals, self.out_aval, self.params = (aval,), f32(*aval.shape), {}
        super().__init__()

    def expand(self, v):
        return v.array

    def jvp(self, primals, tangents):
        return unwrap(*primals), tangents[0]

    lin, linearized = ht.linearize_from_jvp
    vjp_fwd, vjp_bwd_retval = ht.vjp_from_jvp

    def batch(self, axis_data, args, dims):
        return unwrap(*args), 0


def unwrap(v):
    return Unwrap(jax.typeof(v))(v)


class Rewrap(ht.HiPrim):
    def __init__(self, aval):
        self.in_avals, self.out_aval, self.params = (aval,), aval, {}
        super().__init__()

    def expand(self, v):
        return v


def rewrap(v):
    return Rewrap(jax.typeof(v))(v)


def shard_mapped(v):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    f = lambda v: v  # noqa: E731
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=WholeP(), out_specs=WholeP()))(v)


USES = {
    "jit": lambda v: jax.jit(unwrap)(v),
    "returned from jit": lambda v: jax.jit(lambda v: v)(v),
    "grad": lambda v: jax.grad(lambda v: unwrap(v).sum())(v),
    "linearize": lambda v: jax.linearize(unwrap, v),
    "vmap in": lambda v: jax.vmap(unwrap, in_axes=Leading(), axis_size=2)(v),
    "scan over": lambda v: lax.scan(lambda c, v: (c, unwrap(v)), 0, v, length=2),
    "scan out": lambda v: jax.make_jaxpr(
        lambda v: lax.scan(lambda c, v: (c, rewrap(v)), 0, v, length=2)
    )(v),
    "lower": lambda v: jax.jit(lambda v: v).lower(v),
    "shard_map": shard_mapped,
}
CASES = [
    ("lo_ty", "lower", r"lowering \(e.g. under jit\)"),
    ("lower_val", "jit", r"lowering values \(e.g. under jit\)"),
    ("raise_val", "returned from jit", r"raising lowered values \(e.g. under jit\)"),
    ("to_tangent_aval", "grad", "autodiff"),
    ("to_tangent_aval", "linearize", "autodiff"),
    ("dec_rank", "vmap in", "vmap"),
    ("inc_rank", "scan out", "vmap"),
    ("leading_axis_spec", "scan over", "scan"),
    ("shard", "shard_map", "shard_map"),
    ("unshard", "shard_map", "shard_map"),
]


@pytest.mark.parametrize(("method", "use", "needed_for"), CASES)
def test_a_missing_method_is_named(method, use, needed_for):
    message = rf"{needed_for} requires WrapTy to implement the `{method}` method"
    with pytest.raises(NotImplementedError, match=message):
        USES[use](make({method}))


@pytest.mark.parametrize("use", USES)
def test_nothing_is_missing_from_the_whole_type(use):
    USES[use](make(()))


@pytest.mark.parametrize(
    "use", ["jit", "returned from jit", "vmap in", "scan over", "scan out", "shard_map"]
)
def test_only_autodiff_needs_a_tangent_type(use):
    USES[use](make({"to_tangent_aval"}))


def test_only_shard_map_needs_shards():
    for use in set(USES) - {"shard_map"}:
        USES[use](make({"shard", "unshard"}))


def test_equality_must_be_written():
    class Bare(ht.HiType):
        pass

    with pytest.raises(NotImplementedError, match=r"type equality requires Bare .*`__eq__`"):
        _ = Bare() == Bare()
    with pytest.raises(NotImplementedError, match=r"type equality requires Bare .*`__hash__`"):
        hash(Bare())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t.vspace_zero(), "tangent/cotangent type requires .*`vspace_zero`"),
        (lambda t: t.vspace_add(0, 0), "tangent/cotangent type requires .*`vspace_add`"),
        (lambda t: t.nospec(None, True, ()), "autodiff through shard_map requires .*`nospec`"),
        (lambda t: t.reshard(None), "reshard requires .*`reshard`"),
        (lambda t: t.to_ct_aval(), "autodiff requires .*`to_tangent_aval`"),
    ],
)
def test_the_other_methods(call, message):
    ty = jax.typeof(make({"to_tangent_aval"}))
    with pytest.raises(NotImplementedError, match=message):
        call(ty)


@pytest.mark.parametrize("method", ["to_lo", "to_tangent_spec", "to_ct_spec"])
def test_a_spec_without_methods(method):
    class BareP(ht.HiPspec):
        pass

    with pytest.raises(NotImplementedError, match=f"requires BareP to implement the `{method}`"):
        getattr(BareP(), method)()


def test_a_tangent_type_that_cannot_be_added():
    v = make((), tangent=lambda self: self)

    def f(v):
        return (unwrap(v) * unwrap(v)).sum()

    with pytest.raises((NotImplementedError, TypeError)):
        jax.grad(f)(v)


class Bare(ht.HiPrimitive):
    pass


@pytest.mark.parametrize(
    ("method", "use"),
    [
        ("abstract_eval", lambda p: jax.jit(p.bind)(X)),
        ("to_lojax", lambda p: p.bind(X)),
        ("jvp", lambda p: jax.jvp(p.bind, (X,), (X,))),
        ("batch", lambda p: jax.vmap(p.bind)(X)),
    ],
)
def test_a_primitive_without_a_rule(method, use):
    with pytest.raises(NotImplementedError, match=f"requires Bare to implement the `{method}`"):
        use(Bare("bare"))


class NoRules(ht.HiPrim):
    def __init__(self, aval):
        self.in_avals, self.out_aval, self.params = (aval,), aval, {}
        super().__init__()


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda f: f(X), "must implement `expand`"),
        (lambda f: jax.vmap(f)(X), "vmap support.* must implement `batch`"),
        (lambda f: jax.grad(lambda x: f(x).sum())(X), "grad support.* must implement `vjp_fwd`"),
        (lambda f: jax.jvp(f, (X,), (X,)), "jvp support.* must implement `jvp`"),
        (lambda f: jax.linearize(f, X), "linearize support.* must implement `lin`"),
    ],
)
def test_a_hiprim_without_rules(use, message):
    with pytest.raises(NotImplementedError, match=message):
        use(lambda x: NoRules(jax.typeof(x))(x))
