"""Attention that programs write out, found in their dataflow and shown as one operation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import hijax_trace as ht
from interception_core import Interceptor

RNG = np.random.default_rng(0)
BATCH, LENGTH, HEADS, SIZE = 2, 6, 4, 8
Q = jnp.asarray(RNG.normal(size=(BATCH, LENGTH, HEADS, SIZE)), jnp.float32)
K = jnp.asarray(RNG.normal(size=(BATCH, LENGTH, HEADS // 2, SIZE)), jnp.float32)
V = jnp.asarray(RNG.normal(size=(BATCH, LENGTH, HEADS // 2, SIZE)), jnp.float32)
SEEN = jnp.arange(LENGTH) < jnp.array([[3], [LENGTH]])
BIAS = jnp.asarray(RNG.normal(size=(HEADS, LENGTH, LENGTH)), jnp.float32)
CAUSAL = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))


def repeated(x):
    return jnp.repeat(x, 2, axis=2)


def einsums(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, repeated(k)) / np.sqrt(SIZE)
    scores = jnp.where(SEEN[:, None, None], scores, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), repeated(v))


def matmuls(q, k, v):
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, repeated(k), repeated(v)))
    scores = 30 * jnp.tanh(q @ jnp.swapaxes(k, -1, -2) / jnp.sqrt(SIZE) / 30)
    scores = scores + jnp.where(SEEN, 0.0, -1e9)[:, None, None]
    scores = jnp.where(jnp.tri(LENGTH, dtype=bool), scores, jnp.finfo(scores.dtype).min)
    return (jax.nn.softmax(scores) @ v).swapaxes(1, 2)


def groups(q, k, v):
    q = q.reshape(BATCH, LENGTH, HEADS // 2, 2, SIZE)
    scores = jnp.einsum("bqkgd,bskd->bkgqs", q, k).astype(jnp.float32)
    scores = scores.reshape(BATCH, HEADS, LENGTH, LENGTH) * 0.3 + BIAS
    probs = jax.nn.softmax(scores).reshape(BATCH, HEADS // 2, 2, LENGTH, LENGTH)
    out = jnp.einsum("bkgqs,bskd->bqkgd", probs.astype(v.dtype), v)
    return out.reshape(BATCH, LENGTH, HEADS, SIZE)


def by_hand(q, k, v):
    dims = (((3,), (3,)), ((0, 2), (0, 2)))
    scores = lax.dot_general(q, repeated(k), dims) * jnp.float32(0.5)
    shifted = jnp.exp(scores - scores.max(-1, keepdims=True))
    probs = shifted * (1 / shifted.sum(-1, keepdims=True))
    out = lax.dot_general(probs, repeated(v), (((3,), (1,)), ((0, 1), (0, 2))))
    return out.transpose(0, 2, 1, 3)


def by_logarithms(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, repeated(k))
    scores = jnp.where(~SEEN[:, None, None], -1e30, scores)
    left = jnp.exp(scores - jax.scipy.special.logsumexp(scores, axis=-1, keepdims=True))
    right = jnp.exp(jax.nn.log_softmax(scores))
    first = jnp.einsum("bhqk,bkhd->bqhd", left, repeated(v))
    return first + 0 * jnp.einsum("bhqk,bkhd->bqhd", right, repeated(v))


def keys_first(q, k, v):
    scores = jnp.einsum("bkhd,bqhd->bkhq", repeated(k), q)
    return jnp.einsum("bkhq,bkhd->bqhd", jax.nn.softmax(scores, axis=1), repeated(v))


def mapped(q, k, v):
    def one(q, k, v):
        return jax.nn.softmax(q @ k.T) @ v

    return jax.vmap(jax.vmap(one, 1, 1))(q, repeated(k), repeated(v))


def in_functions(q, k, v):
    @jax.jit
    def weights(q, k):
        return jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))

    return jnp.einsum("bhqk,bkhd->bqhd", weights(q, repeated(k)), repeated(v))


def in_a_loop(q, k, v):
    return lax.scan(lambda carry, _: (carry + einsums(carry, k, v), None), q, None, length=2)[0]


def one_query(q, k, v):
    q = q[:, :1].reshape(BATCH, 1, HEADS // 2, 2, SIZE)
    scores = jnp.einsum("bqkgd,bskd->bkgqs", q, k)
    scores = jnp.where(SEEN[:, None, None, None], scores, -jnp.inf)
    return jnp.einsum("bkgqs,bskd->bqkgd", jax.nn.softmax(scores), v)


WRITTEN = {
    "einsums": (einsums, 1),
    "matmuls": (matmuls, 1),
    "groups": (groups, 1),
    "by hand": (by_hand, 1),
    "keys first": (keys_first, 1),
    "mapped": (mapped, 1),
    "in functions": (in_functions, 1),
    "in a loop": (in_a_loop, 1),
    "in remat": (lambda *args: jax.checkpoint(einsums)(*args), 1),
    "one query": (one_query, 1),
}


def tapped(fn, seen, also=()):
    """``fn``, its attentions computed by what they say that they are; ``seen`` gets what is asked.

    What they are is computed in other operations, so that it is a check of what was read.
    """

    def ask(call, *values, written, also_used):
        seen.append((call.op_id, also_used, written))
        return NotImplemented if also_used else written(*values)

    def note(call, *args, **kwargs):
        seen.append((call.op_id,))
        return NotImplemented

    targets = dict.fromkeys(("jax.numpy.einsum", "jax.numpy.matmul", *also), note)
    return ht.TraceEngine().wrap(fn, Interceptor({"provider_xla_fused.attention": ask, **targets}))


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_out_is_one_operation(name):
    fn, count = WRITTEN[name]
    seen = []
    run = tapped(fn, seen)
    found, wanted = jax.jit(lambda *args: (run(*args), fn(*args)))(Q, K, V)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=2e-6)
    assert len(seen) == count, seen  # its contractions are shown to no other handler
    assert all(op_id.endswith("attention:0") for op_id, *_ in seen)
    np.testing.assert_allclose(run(Q, K, V), wanted, rtol=1e-5, atol=2e-6)  # without JIT


def test_gradients_are_those_of_the_program():
    def loss(fn, *args):
        return jnp.sum(jnp.sin(fn(*args)))

    for fn in (einsums, matmuls, groups, in_a_loop):
        plain, ours = (functools.partial(loss, one) for one in (fn, tapped(fn, [])))
        inside = tapped(jax.grad(plain), [])

        @jax.jit  # compiled once for all three
        def run(*args, plain=plain, ours=ours, inside=inside):
            return *(jax.grad(one, (0, 1, 2))(*args) for one in (plain, ours)), inside(*args)

        expected, found, first = run(Q, K, V)
        for one, other in zip((*found, first), (*expected, expected[0]), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_what_is_known_of_it():
    seen = []
    tapped(matmuls, seen)(Q, K, V)
    ((_, _, written),) = seen
    np.testing.assert_allclose((written.scale, written.softcap), (SIZE**-0.5, 30))
    assert written.is_causal
    seen.clear()
    tapped(einsums, seen)(Q, K, V)
    ((_, _, written),) = seen
    assert (written.softcap, written.is_causal, written.fills) == (None, False, True)


def test_axes_that_a_mask_does_not_have_stay_small():
    found = []

    def ask(call, *values, written, also_used):
        found.append(written.operands(*values))
        return NotImplemented

    ht.TraceEngine().wrap(einsums, Interceptor({"provider_xla_fused.attention": ask}))(Q, K, V)
    ((query, key, value, bias, mask),) = found
    assert bias is None
    assert mask.shape == (BATCH, 1, 1, LENGTH)
    assert query.shape == key.shape == value.shape == (BATCH, LENGTH, HEADS, SIZE)
    found.clear()
    ht.TraceEngine().wrap(groups, Interceptor({"provider_xla_fused.attention": ask}))(Q, K, V)
    ((query, key, value, bias, mask),) = found
    assert mask is None
    assert bias.shape == (1, HEADS, LENGTH, LENGTH)
    assert (query.shape[2], key.shape, value.shape) == (HEADS, K.shape, V.shape)


def test_a_handler_may_leave_it():
    seen = []

    def ask(call, *values, written, also_used):
        seen.append(call.op_id)
        return NotImplemented

    def note(call, *args, **kwargs):
        seen.append(call.op_id)
        return call.proceed(*args, **kwargs)

    targets = {"provider_xla_fused.attention": ask, "jax.numpy.einsum": note}
    run = ht.TraceEngine().wrap(einsums, Interceptor(targets))
    np.testing.assert_array_equal(run(Q, K, V), einsums(Q, K, V))
    assert seen == ["attention:0", "einsum:0", "einsum:1"]


def used_elsewhere(part):
    def fn(q, k, v):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, repeated(k))
        probs = jax.nn.softmax(scores)
        out = jnp.einsum("bhqk,bkhd->bqhd", probs, repeated(v))
        return {"scores": (out, scores.mean()), "probabilities": (out, probs)}[part]

    return fn


@pytest.mark.parametrize("part", ["scores", "probabilities"])
def test_what_is_used_elsewhere_is_computed(part):
    seen, fn = [], used_elsewhere(part)
    run = jax.jit(tapped(fn, seen))
    for one, other in zip(run(Q, K, V), jax.jit(fn)(Q, K, V), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
    assert [op_id for op_id, *_ in seen] == ["einsum:0", "attention:0", "einsum:1"]
    assert seen[1][1] == (f"its {part}",)


def test_two_with_the_same_scores_are_left():
    seen = []
    run, plain = jax.jit(tapped(by_logarithms, seen)), jax.jit(by_logarithms)
    np.testing.assert_allclose(run(Q, K, V), plain(Q, K, V), rtol=1e-5, atol=1e-6)
    asked = [one for one in seen if "attention" in one[0]]
    assert [also for _, also, _ in asked] == [("its scores",)] * 2


SCORES = "bqhd,bkhd->bhqk"
MIX = "bhqk,bkhd->bqhd"
OTHERS = {
    "another axis": lambda q: jnp.einsum(
        "bhqk,bqhd->bkhd", jax.nn.softmax(jnp.einsum(SCORES, q, q)), q
    ),
    "a softmax over queries": lambda q: jnp.einsum(
        MIX, jax.nn.softmax(jnp.einsum(SCORES, q, q), axis=2), q
    ),
    "a softmax of one head alone": lambda q: jnp.einsum(
        MIX, jax.nn.softmax(jnp.einsum(SCORES, q, q), axis=(1, 3)), q
    ),
    "other numbers between": lambda q: jnp.einsum(
        MIX, jax.nn.softmax(jnp.einsum(SCORES, q, q)) ** 2, q
    ),
    "dropped out": lambda q: jnp.einsum(
        MIX, jax.nn.softmax(jnp.einsum(SCORES, q, q)) * (BIAS > 0).astype(jnp.float32), q
    ),
    "a mask that hides little": lambda q: jnp.einsum(
        MIX, jax.nn.softmax(jnp.where(CAUSAL, jnp.einsum(SCORES, q, q), -1.0)), q
    ),
    "a bias on what is masked": lambda q: jnp.einsum(
        MIX, jax.nn.softmax(jnp.where(CAUSAL, jnp.einsum(SCORES, q, q), -1e9) + BIAS), q
    ),
    "a sum of other scores": lambda q: jnp.einsum(
        MIX,
        jnp.exp(jnp.einsum(SCORES, q, q))
        / jnp.exp(0.5 * jnp.einsum(SCORES, q, q)).sum(-1, keepdims=True),
        q,
    ),
    "the maximum of other scores": lambda q: jnp.einsum(
        MIX, jnp.einsum(SCORES, q, q) - jnp.einsum(SCORES, q, q).max(-1, keepdims=True), q
    ),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", OTHERS)
def test_other_functions_are_left(name):
    seen, fn = [], OTHERS[name]
    found = jax.jit(tapped(fn, seen))(Q)
    np.testing.assert_allclose(found, jax.jit(fn)(Q), rtol=1e-5, atol=1e-5)
    assert all("einsum" in op_id for op_id, *_ in seen)
    assert len(seen) >= 2


def test_the_function_itself_computes_it():
    found = []

    def ask(call, *values, written, also_used):
        found.append((values, written))
        return call.proceed(*values, written=written, also_used=also_used)

    run = ht.TraceEngine().wrap(einsums, Interceptor({"provider_xla_fused.attention": ask}))
    out, wanted = jax.jit(lambda *args: (run(*args), einsums(*args)))(Q, K, V)
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=2e-6)
