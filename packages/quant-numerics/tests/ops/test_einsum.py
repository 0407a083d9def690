import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtap_testkit import examples
from jaxtap_testkit.qarray_samples import value
from quant_numerics import (
    einsum,
    einsum_dimension_numbers,
    qarray,
    quantize,
    quantize_for_dot,
)

pytestmark = pytest.mark.sample(2)


def run(spec, lhs, rhs, **options):
    return jax.jit(lambda a, b: einsum(spec, a, b, **options))(lhs, rhs)


def coarse(shape, seed):
    """A QArray with small quantized values, so that float32 sums are exact; per-channel on the
    first axis.
    """
    rng = np.random.default_rng(seed)
    qvalue = rng.integers(-7, 8, shape).astype(np.int8)
    scale_shape = [n if a == 0 else 1 for a, n in enumerate(shape)]
    scale = (2.0 ** rng.integers(-1, 2, scale_shape)).astype(np.float32)
    return qarray(qvalue, scale, "int8", jnp.float32)


SPECS = [
    ("ij,jk->ik", (2, 3), (3, 4)),
    ("ij,jk", (2, 3), (3, 4)),
    ("ba,cb", (2, 3), (4, 2)),  # implicit output is alphabetical
    (" ij , jk -> ki ", (2, 3), (3, 4)),
    ("bqhd,bkhd->bhqk", (2, 3, 2, 4), (2, 5, 2, 4)),
    ("btd,dnh->btnh", (2, 3, 4), (4, 2, 5)),
    ("btnh,nhd->btd", (2, 3, 2, 5), (2, 5, 4)),
    ("i,i->", (3,), (3,)),
    ("i,j->ji", (3,), (2,)),
    ("i,i->i", (3,), (3,)),
    (",->", (), ()),
    (",i->i", (), (3,)),
    ("...ij,...jk->...ik", (2, 5, 2, 3), (2, 5, 3, 4)),
    ("...ij,jk->...ik", (2, 5, 2, 3), (3, 4)),
    ("...ij,...jk", (2, 2, 3), (2, 3, 4)),
    ("...ij,...jk->...ik", (1, 2, 3), (5, 3, 4)),  # size 1 broadcasts
    ("...ij,...jk->...ik", (4, 2, 3), (5, 4, 3, 4)),
    ("...,...->...", (2, 3), (3,)),
    ("ij,jk->ik", (2, 1), (3, 4)),  # a contracted axis broadcasts too
    ("ij,jk->jik", (2, 3), (1, 4)),
    ("ij,jk->k", (2, 3), (3, 4)),  # i is only in the first operand
    ("ij,kj->i", (2, 3), (4, 3)),
    ("ij,kl->", (2, 3), (4, 3)),
    ("ij,jk->ik", (0, 3), (3, 4)),
    ("ij,jk->ik", (2, 0), (0, 4)),
    ("ij,jk->k", (0, 3), (3, 4)),
]


@pytest.mark.slow
@pytest.mark.parametrize("which", ["both", "lhs", "rhs", "neither"])
def test_it_equals_numpys(which):
    problems = []
    for spec, shape_l, shape_r in SPECS:
        lhs, rhs = coarse(shape_l, 0), coarse(shape_r, 1)
        if which in ("rhs", "neither"):
            lhs = value(lhs).astype(np.float32)
        if which in ("lhs", "neither"):
            rhs = value(rhs).astype(np.float32)
        problems.append((spec, lhs, rhs))
    specs = [spec for spec, _, _ in problems]
    outs = jax.jit(lambda pairs: [einsum(s, *p) for s, p in zip(specs, pairs, strict=True)])(
        [pair for _, *pair in problems]
    )
    for (spec, lhs, rhs), out in zip(problems, outs, strict=True):
        assert out.dtype == jnp.float32
        np.testing.assert_array_equal(out, np.einsum(spec, value(lhs), value(rhs)), err_msg=spec)


@pytest.mark.slow
@examples(30)
@given(
    st.permutations("abc").flatmap(lambda p: st.integers(0, 3).map(lambda n: p[:n])),
    st.permutations("abcd").flatmap(lambda p: st.integers(0, 3).map(lambda n: p[:n])),
    st.permutations("abcd"),
    st.integers(0, 4),
    st.tuples(*[st.integers(1, 3)] * 4),
    st.integers(0, 99),
)
def test_any_labels_in_any_order(in_l, in_r, order, kept, sizes, seed):
    size = dict(zip("abcd", sizes, strict=True))
    out = [c for c in order if c in in_l or c in in_r][:kept]
    spec = f"{''.join(in_l)},{''.join(in_r)}->{''.join(out)}"
    lhs = coarse([size[c] for c in in_l], seed)
    rhs = coarse([size[c] for c in in_r], seed + 1)
    np.testing.assert_array_equal(run(spec, lhs, rhs), np.einsum(spec, value(lhs), value(rhs)))


def test_it_is_one_integer_dot(primitives):
    lhs, rhs = coarse((2, 3, 2, 4), 0), coarse((2, 5, 2, 4), 1)
    eqns = primitives(functools.partial(einsum, "bqhd,bkhd->bhqk"), lhs, rhs)
    dots = [e for e in eqns if e[0] == "dot_general"]
    assert dots == [("dot_general", ["int8", "int8"], ["int32"])]


def test_a_label_summed_in_one_operand_makes_it_float(primitives):
    eqns = primitives(functools.partial(einsum, "ij,jk->k"), coarse((2, 3), 0), coarse((3, 4), 1))
    dots = [e for e in eqns if e[0] == "dot_general"]
    assert dots == [("dot_general", ["float32", "float32"], ["float32"])]


@pytest.mark.parametrize(
    ("spec", "ndims", "want"),
    [
        ("ij,jk->ik", (2, 2), (((1,), (0,)), ((), ()))),
        ("bqhd,bkhd->bhqk", (4, 4), (((3,), (3,)), ((0, 2), (0, 2)))),
        ("btnh,hnd->btd", (4, 3), (((2, 3), (1, 0)), ((), ()))),
        ("...ij,...jk", (3, 4), (((2,), (2,)), ((0,), (1,)))),
        ("ij,jk->k", (2, 2), (((1,), (0,)), ((), ()))),
        ("i,j->ij", (1, 1), (((), ()), ((), ()))),
    ],
)
def test_dimension_numbers(spec, ndims, want):
    assert einsum_dimension_numbers(spec, *ndims) == want


def test_dimension_numbers_tell_how_to_quantize():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 4, 8)).astype(np.float32)
    w = rng.normal(size=(8, 4, 5)).astype(np.float32)
    spec = "btnh,hnd->btd"
    (lc, rc), _ = einsum_dimension_numbers(spec, x.ndim, w.ndim)

    @jax.jit
    def f(x, w):
        return einsum(spec, *(quantize_for_dot(a, c, "int8", 4) for a, c in ((x, lc), (w, rc))))

    np.testing.assert_allclose(f(x, w), np.einsum(spec, x, w), atol=0.3)


def test_dtypes():
    lhs, rhs = jnp.ones((2, 3), jnp.bfloat16), jnp.ones((3, 2), jnp.float16)

    def dtype(spec, **options):
        return jax.eval_shape(
            lambda a, b: einsum(spec, quantize(a, "int8"), b, **options), lhs, rhs
        ).dtype

    for spec in ("ij,jk->ik", "ij,jk->k", "ij,jk->i"):
        assert dtype(spec) == jnp.float32
        assert dtype(spec, preferred_element_type=jnp.bfloat16) == jnp.bfloat16


def test_gradient_of_a_weight_only_einsum():
    x, w = np.ones((2, 3, 4), np.float32), coarse((4, 5), 0)
    grad = jax.jit(jax.grad(lambda x: einsum("btd,df->fbt", x, w).sum()))(x)
    np.testing.assert_array_equal(grad, np.broadcast_to(value(w).sum(1), x.shape))


def test_vmap():
    lhs, rhs = coarse((3, 2, 4), 0), coarse((3, 4, 5), 1)
    out = jax.jit(jax.vmap(functools.partial(einsum, "ij,jk->ki")))(lhs, rhs)
    np.testing.assert_array_equal(out, run("bij,bjk->bki", lhs, rhs))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("ij->ij", "must be given 1 operands, got 2"),
        ("ij,jk,kl->il", "must be given 3 operands, got 2"),
        ("ij,jk->ii", "more than once in the output"),
        ("ij,jk->iz", "did not appear in the input"),
        ("ij,jk->i->k", "only contain one '->'"),
        ("i.j,jk->ik", "Invalid Ellipses"),
        ("...ijk,jk->i", "Ellipses lengths do not match"),
        ("ijk,jk->i", "must name the 2 axes of an operand, got 3"),
        ("i1,1k->ik", "must be letters"),
        ("ij,jk->ik", "label 'j' .* got 3 in operand 0 .* and 4 in operand 1"),
    ],
)
def test_errors_say_what_is_wrong_and_what_is_allowed(spec, message):
    with pytest.raises(ValueError, match=message) as e:
        einsum(spec, jnp.ones((2, 3)), jnp.ones((4, 5)))
    assert "Write letters" in str(e.value) or "must be equal" in str(e.value)


def test_operands_must_be_float_or_quantized():
    with pytest.raises(TypeError, match=r"lhs, where not a QArray, must .* got int32"):
        einsum("i,i", jnp.ones(3, jnp.int32), jnp.ones(3))


MANY = [
    ("ij,jk,kl->il", [(2, 3), (3, 4), (4, 5)]),
    ("ij,jk,kl->li", [(2, 3), (3, 4), (4, 5)]),
    ("bij,bjk,bk->bi", [(2, 3, 4), (2, 4, 5), (2, 5)]),
    ("a,b,c->cab", [(2,), (3,), (4,)]),
    ("ij,jk,kl,lm->", [(2, 3), (3, 4), (4, 2), (2, 3)]),
    ("...ij,...jk,kl", [(2, 2, 3), (1, 3, 4), (4, 5)]),
    ("ij,ij,ij->ij", [(2, 3), (2, 1), (2, 3)]),
    ("ab,b,c,a->c", [(2, 3), (3,), (4,), (2,)]),
    ("ij,jk,k->", [(2, 3), (3, 4), (1,)]),
]
DIAGONALS = [
    ("ii,ij->j", [(3, 3), (3, 4)]),
    ("iji,jk->ik", [(2, 3, 2), (3, 4)]),
    ("ii,jj->ij", [(3, 3), (2, 2)]),
    ("ijjk,kk->i", [(2, 3, 3, 4), (4, 4)]),
]
ALONE = [("ii->i", [(3, 3)]), ("ii", [(3, 3)]), ("ij->ji", [(2, 3)]), ("...ij->...", [(2, 3, 4)])]


@pytest.mark.parametrize(("spec", "shapes"), MANY + DIAGONALS + ALONE)
def test_any_number_of_operands(spec, shapes):
    operands = [coarse(s, i) for i, s in enumerate(shapes)]
    want = np.einsum(spec, *map(value, operands))
    np.testing.assert_array_equal(jax.jit(functools.partial(einsum, spec))(*operands), want)
    operands[0] = value(operands[0]).astype(np.float32)
    np.testing.assert_array_equal(jax.jit(functools.partial(einsum, spec))(*operands), want)


@pytest.mark.slow
@pytest.mark.parametrize("optimize", [True, False, "greedy", "auto", [(1, 2), (0, 1)], [(0, 1, 2)]])
def test_every_order_gives_the_same(optimize):
    operands = [coarse(s, i) for i, s in enumerate([(2, 3), (3, 4), (4, 5)])]
    out = einsum("ij,jk,kl->il", *operands, optimize=optimize)
    np.testing.assert_array_equal(out, np.einsum("ij,jk,kl->il", *map(value, operands)))


def test_the_order_is_the_cheapest(primitives):
    operands = [coarse(s, i) for i, s in enumerate([(64, 3), (3, 64), (64, 1)])]
    eqns = primitives(functools.partial(einsum, "ij,jk,kl->il"), *operands)
    dots = [e for e in eqns if e[0] == "dot_general"]
    # The last two are quantized, and contracted first.
    assert dots == [
        ("dot_general", ["int8", "int8"], ["int32"]),
        ("dot_general", ["float32", "float32"], ["float32"]),
    ]


@pytest.mark.parametrize(
    "labels",
    [
        ([0, 1], [1, 2], [0, 2]),
        ([0, 1], [1, 2], [2, 0]),
        ([7, 3], [3, 5], None),
        ([0, 1], [1, 2], []),
        (["a", "b"], ["b", "c"], ["c", "a"]),
        ([Ellipsis, 1], [1, 2], [Ellipsis, 2]),
        ([60, 70], [70, 80], [60, 80]),
    ],
)
def test_the_interleaved_form(labels):
    left, right, out = labels
    lhs, rhs = coarse((2, 3), 0), coarse((3, 4), 1)
    tail = () if out is None else (out,)
    got = einsum(lhs, left, rhs, right, *tail)
    small = {60: 0, 70: 1, 80: 2, "a": 0, "b": 1, "c": 2}  # what NumPy takes
    left, right, *tail = ([small.get(c, c) for c in label] for label in (left, right, *tail))
    np.testing.assert_array_equal(got, np.einsum(value(lhs), left, value(rhs), right, *tail))


@pytest.mark.slow
def test_intermediates_have_the_outputs_dtype(primitives):
    operands = [jnp.ones((2, 2), jnp.bfloat16) for _ in range(3)]
    quantized = [quantize(x, "int8") for x in operands]
    out = jax.eval_shape(functools.partial(einsum, "ij,jk,kl->il"), *quantized)
    assert out.dtype == jnp.bfloat16
    mixed = [quantized[0], operands[1].astype(jnp.float16), quantized[2]]
    assert jax.eval_shape(functools.partial(einsum, "ij,jk,kl->il"), *mixed).dtype == jnp.float32
    half = functools.partial(einsum, "ij,jk,kl->il", preferred_element_type=jnp.float16)
    assert jax.eval_shape(half, *quantized).dtype == jnp.float16


@pytest.mark.slow
def test_numbers_of_operands():
    with pytest.raises(ValueError, match="must be given 2 operands, got 1"):
        einsum("ij,jk->ik", coarse((2, 3), 0))
    with pytest.raises(ValueError, match="must be given operands, got none"):
        einsum("ij->i")
    with pytest.raises(ValueError, match="must have no label twice"):
        einsum_dimension_numbers("ii,ij->j", 2, 2)
    with pytest.raises(TypeError, match="operand 2, where not a QArray, must"):
        einsum("i,i,i", jnp.ones(3), jnp.ones(3), jnp.ones(3, jnp.int32))
