"""HiPrim with the interface of JAX 0.12, on all versions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import hijax_trace as ht

X = np.array([1.0, 2.0, 3.0], np.float32)


class Cube(ht.HiPrim):
    """x to the third, with rules as the subclasses say."""

    def __init__(self, aval):
        self.in_avals, self.out_aval, self.params = (aval,), aval, {}
        super().__init__()

    def expand(self, x):
        return x**3


class Jvp(Cube):
    def jvp(self, primals, tangents):
        (x,), (t,) = primals, tangents
        return type(self)(jax.typeof(x))(x), 3 * x**2 * t


class FromJvp(Jvp):
    lin, linearized = ht.linearize_from_jvp
    vjp_fwd, vjp_bwd_retval = ht.vjp_from_jvp


class FromLin(Cube):
    def lin(self, nzs_in, x):
        return type(self)(jax.typeof(x))(x), x

    def linearized(self, x, t):
        return 3 * x**2 * t

    jvp = ht.jvp_from_lin
    vjp_fwd, vjp_bwd_retval = ht.vjp_from_lin


class Written(Jvp):
    def vjp_fwd(self, nzs_in, x):
        return type(self)(jax.typeof(x))(x), x

    def vjp_bwd(self, x, cotangent, accum):
        accum.accum(3 * x**2 * cotangent)

    lin, linearized = ht.linearize_from_jvp

    def batch(self, axis_data, args, dims):
        return type(self)(jax.typeof(*args))(*args), dims[0]


class Retval(Written):
    vjp_bwd = ht.HiPrim.vjp_bwd

    def vjp_bwd_retval(self, x, cotangent):
        return (3 * x**2 * cotangent,)


ALL = [FromJvp, FromLin, Written, Retval]


def call(cls):
    return lambda x: cls(jax.typeof(x))(x)


@pytest.fixture(params=[lambda f: f, jax.jit], ids=["eager", "jit"])
def jit(request):
    return request.param


@pytest.mark.slow
@pytest.mark.parametrize("cls", ALL)
def test_grad(cls, jit):
    np.testing.assert_allclose(jit(call(cls))(X), X**3)
    np.testing.assert_allclose(jit(jax.grad(lambda x: call(cls)(x).sum()))(X), 3 * X**2)
    np.testing.assert_allclose(jax.grad(lambda x: jit(call(cls))(x).sum())(X), 3 * X**2)


@pytest.mark.parametrize("cls", ALL)
def test_linearize(cls):
    out, linear = jax.linearize(call(cls), X)
    np.testing.assert_allclose(out, X**3)
    np.testing.assert_allclose(linear(np.ones_like(X)), 3 * X**2)


@pytest.mark.parametrize("cls", ALL)
def test_jvp(cls, jit):
    out, tangent = jit(lambda x: jax.jvp(call(cls), (x,), (jnp.ones_like(x),)))(X)
    np.testing.assert_allclose(out, X**3)
    np.testing.assert_allclose(tangent, 3 * X**2)


@pytest.mark.slow
@pytest.mark.parametrize("cls", ALL)
def test_grad_of_scan_and_remat(cls):
    f = lambda x: lax.scan(lambda c, _: (call(cls)(c), None), x, None, length=2)[0].sum()  # noqa: E731
    np.testing.assert_allclose(jax.grad(f)(X), 9 * X**8, rtol=1e-5)
    np.testing.assert_allclose(jax.jit(jax.grad(jax.checkpoint(f)))(X), 9 * X**8, rtol=1e-5)


@pytest.mark.slow
def test_derived_rules_of_two_arguments():
    class Mul(ht.HiPrim):
        def __init__(self, x, y):
            self.in_avals, self.out_aval, self.params = (x, y), x, {}
            super().__init__()

        def expand(self, x, y):
            return x * y

        def jvp(self, primals, tangents):
            (x, y), (tx, ty) = primals, (t if hasattr(t, "dtype") else 0 for t in tangents)
            return mul(x, y), tx * y + x * ty

        lin, linearized = ht.linearize_from_jvp
        vjp_fwd, vjp_bwd_retval = ht.vjp_from_jvp

    def mul(x, y):
        return Mul(jax.typeof(x), jax.typeof(y))(x, y)

    f = lambda x, y: (mul(x, y) * y).sum()  # noqa: E731
    with jax.numpy_dtype_promotion("standard"):
        gx, gy = jax.grad(f, (0, 1))(X, X + 1)
        np.testing.assert_allclose(jax.grad(f)(X, X + 1), (X + 1) ** 2)
    np.testing.assert_allclose(gx, (X + 1) ** 2)
    np.testing.assert_allclose(gy, 2 * X * (X + 1))


def test_rules_that_derive_each_other_are_refused():
    class Circle(Cube):
        lin, linearized = ht.linearize_from_jvp
        jvp = ht.jvp_from_lin

    with pytest.raises(TypeError, match="can't set both"):
        jax.jvp(call(Circle), (X,), (X,))


def test_batch():
    xs = np.stack([X, X + 1])
    np.testing.assert_allclose(jax.vmap(call(Written))(xs), xs**3)
    np.testing.assert_allclose(jax.vmap(call(Written), in_axes=1, out_axes=1)(xs), xs**3)


def test_vmap_rule_maps_the_expansion():
    class Summed(Cube):
        def batch(self, axis_data, args, dims):
            return ht.vmap_rule(axis_data, self.expand, dims, 0)(*args), 0

    xs = np.stack([X, X + 1])
    np.testing.assert_allclose(jax.vmap(call(Summed))(xs), xs**3)


def test_unmap_avals_and_bdims_at_front():
    seen = {}

    class Sees(Cube):
        def batch(self, axis_data, args, dims):
            seen["whole"] = ht.unmap_avals(axis_data, self.in_avals, dims)
            (x,) = ht.bdims_at_front(axis_data, args, dims)
            return call(Sees)(x), 0

    xs = np.stack([X, X + 1])
    np.testing.assert_allclose(jax.vmap(call(Sees), in_axes=1)(xs.T), xs**3)
    assert [aval.shape for aval in seen["whole"]] == [(3, 2)]


def test_dce_is_told_what_is_used_and_what_is_live():
    seen = []

    class Pair(ht.HiPrim):
        def __init__(self, aval):
            self.in_avals, self.out_aval, self.params = (aval,), (aval, aval), {}
            super().__init__()

        def expand(self, x):
            return x, 2 * x

        def dce(self, used_outs, live_ins):
            seen.append((used_outs, live_ins))
            return True, True, self

        lin, linearized = ht.linearize_from_jvp
        vjp_fwd, vjp_bwd_retval = ht.vjp_from_jvp

        def jvp(self, primals, tangents):
            return self(*primals), (tangents[0], 2 * tangents[0])

    # Recomputing under remat drops what the gradient doesn't use.
    f = jax.checkpoint(lambda x: jnp.sin(Pair(jax.typeof(x))(x)[1]).sum())
    np.testing.assert_allclose(jax.jit(jax.grad(f))(X), 2 * np.cos(2 * X), rtol=1e-5)
    assert ((False, True), (True,)) in seen


def test_what_is_unused_is_dropped_by_default():
    jaxpr = jax.make_jaxpr(jax.grad(jax.checkpoint(lambda x: (call(Written)(x), x.sum())[1])))(X)
    assert "Written" not in str(jaxpr)


def test_effects_and_refs():
    class Square(ht.HiPrim):
        def __init__(self, ref):
            self.in_avals, self.out_aval, self.params = (ref,), None, {}
            super().__init__()

        def expand(self, ref):
            ref[...] = ref[...] ** 2

    ref = jax.new_ref(X)
    Square(jax.typeof(ref))(ref)
    np.testing.assert_allclose(ref[...], X**2)


def test_equal_types_and_parameters_are_one_trace():
    traced = []

    @jax.jit
    def f(x):
        traced.append(x)
        return call(Written)(x)

    f(X), f(X + 1)
    assert len(traced) == 1
    assert Written(jax.typeof(X)) == Written(jax.typeof(X))
    assert hash(Written(jax.typeof(X))) == hash(Written(jax.typeof(X)))


def test_its_repr_has_its_parameters():
    class Scale(Cube):
        def __init__(self, aval):
            self.in_avals, self.out_aval, self.params = (aval,), aval, {"by": 3, "_hidden": 4}
            ht.HiPrim.__init__(self)

    text = repr(Scale(jax.typeof(X)))
    assert text.startswith("Scale")
    assert "by=3" in text
    assert "hidden" not in text


def test_a_subclass_must_set_its_types():
    class Empty(ht.HiPrim):
        pass

    with pytest.raises(AttributeError, match="in_avals"):
        Empty()


class Scaled(ht.HiPrim):
    """x times a number of which no derivative is asked: its tangent may be a symbolic zero."""

    def __init__(self, x, factor):
        self.in_avals, self.out_aval, self.params = (x, factor), x, {}
        super().__init__()

    def expand(self, x, factor):
        return x * factor

    def jvp(self, primals, tangents):
        (x, factor), (dx, dfactor) = primals, tangents
        kinds.append((isinstance(dx, ht.Zero), isinstance(dfactor, ht.Zero)))
        dx, dfactor = ht.instantiate_zeros((dx, dfactor))
        return self(x, factor), dx * factor + x * dfactor

    lin, linearized = ht.linearize_from_jvp


kinds = []


@pytest.mark.slow
def test_symbolic_zeros():
    """A derivative rule gets them, and makes arrays of them."""
    x = jnp.arange(3.0)

    def scaled(x, factor):
        return Scaled(jax.typeof(x), jax.typeof(factor))(x, factor)

    out = jax.jvp(lambda x: scaled(x, jnp.float32(2)), (x,), (jnp.ones(3),))
    np.testing.assert_array_equal(out, [2 * x, [2.0, 2, 2]])
    out = jax.jvp(lambda factor: scaled(x, factor), (jnp.float32(2),), (jnp.float32(1),))
    np.testing.assert_array_equal(out, [2 * x, x])
    assert kinds == [(False, True), (True, False)]
    zero = ht.instantiate_zeros({"a": ht.Zero(jax.typeof(x)), "b": [x]})
    assert jax.tree.map(type, zero) == {"a": type(x), "b": [type(x)]}
    np.testing.assert_array_equal(zero["a"], np.zeros(3))
