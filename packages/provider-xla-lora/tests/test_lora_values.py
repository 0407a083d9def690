"""Values and gradients with adapters, against float64 NumPy and the merged float program."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import quant_numerics as qn
from jaxtap_testkit import examples
from jaxtap_testkit.xla_samples import LAYOUT, PROGRAMS, draw, make
from provider_xla import LoraRule, PtqProvider, QuantizationWarning

pytestmark = pytest.mark.sample(2)

RANK, ALPHA = 2, 3.0


def rule(qtype, **fields):
    return LoraRule(weight_qtype=qtype, rank=RANK, alpha=ALPHA, **fields)


def filled(plan, seed=1, dtype=None):
    """Adapters none of whose numbers is zero."""
    adapters = plan.init_adapters(jax.random.key(0), dtype)
    leaves, treedef = jax.tree.flatten(adapters)
    rng = np.random.default_rng(seed)
    return jax.tree.unflatten(
        treedef, [jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype) for x in leaves]
    )


def prepared(fn, params, x, *rules):
    plan = PtqProvider(rules).plan(fn, params, x)
    return plan, plan.quantize(params), filled(plan), plan.apply(fn)


def is_qvalue(node):
    return isinstance(node, qn.QArray | qn.PackedQArray)


def f64(x):
    if is_qvalue(x):
        x = qn.dequantize(qn.unpack(x) if isinstance(x, qn.PackedQArray) else x)
    return np.asarray(x, np.float64)


def merged(plan, stored, adapters):
    """``Wq + alpha / rank * A B`` in float64, by one einsum per parameter."""
    found, treedef = jax.tree_util.tree_flatten_with_path(stored, is_leaf=is_qvalue)
    leaves = []
    for path, leaf in found:
        w = f64(leaf)
        one = plan.adapters.get("args[0]" + jax.tree_util.keystr(path))
        if one is not None:
            axes = "abcdefgh"[: w.ndim]
            lead, rows, columns = (
                "".join(axes[i] for i in part)
                for part in (one.form.lead, one.form.contracted, one.form.kept)
            )
            a, b = (f64(adapters[one.path][name]) for name in "ab")
            w = w + ALPHA / RANK * np.einsum(f"{lead}{rows}z,{lead}z{columns}->{axes}", a, b)
        leaves.append(w)
    return jax.tree.unflatten(treedef, leaves)


def close(actual, expected, tolerance=2e-5):
    difference = np.asarray(actual, np.float64) - np.asarray(expected, np.float64)
    assert np.abs(difference).max() <= tolerance * np.abs(np.asarray(expected, np.float64)).max()


FLOAT = ("operator", "scan", "tied", "convolution", "experts")


@pytest.mark.parametrize(
    ("name", "qtype"), [(name, "int8") for name in PROGRAMS] + [(name, None) for name in FLOAT]
)
def test_every_program_is_that_of_the_merged_parameters(name, qtype):
    fn, params, x = make(name)
    plan, stored, adapters, run = prepared(fn, params, x, rule(qtype))
    assert len(plan.adapters) == len(jax.tree.leaves(params))
    assert all(is_qvalue(leaf) == (qtype is not None)
               for leaf in jax.tree.leaves(stored, is_leaf=is_qvalue))  # fmt: skip

    def loss(adapters):
        y = run(stored, x, adapters=adapters)
        return (y.astype(jnp.float32) ** 2).sum(), y

    def expected_loss(w):
        y = fn(w, x)
        return (y.astype(jnp.float32) ** 2).sum(), y

    w = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), merged(plan, stored, adapters))
    (gradient, y), (by_weight, expected) = jax.jit(
        lambda a, w: (jax.grad(loss, has_aux=True)(a), jax.grad(expected_loss, has_aux=True)(w))
    )(adapters, w)
    tolerance = 2e-2 if y.dtype == jnp.bfloat16 else 2e-5
    assert y.dtype == expected.dtype
    close(y, expected, tolerance)

    # dA = s dW Bᵀ, dB = s Aᵀ dW, along the axes that each has.
    found, _ = jax.tree_util.tree_flatten_with_path(by_weight)
    for path, of_weight in found:
        one = plan.adapters["args[0]" + jax.tree_util.keystr(path)]
        axes = "abcdefgh"[: of_weight.ndim]
        lead, rows, columns = (
            "".join(axes[i] for i in part)
            for part in (one.form.lead, one.form.contracted, one.form.kept)
        )
        left, right = f"{lead}{rows}z", f"{lead}z{columns}"
        a, b = (f64(adapters[one.path][part]) for part in "ab")
        dw = ALPHA / RANK * f64(of_weight)
        close(gradient[one.path]["a"], np.einsum(f"{axes},{right}->{left}", dw, b), 3 * tolerance)
        close(gradient[one.path]["b"], np.einsum(f"{axes},{left}->{right}", dw, a), 3 * tolerance)


LETTERS = "ijkl"


@st.composite
def einsums(draw):
    """An einsum of an activation and a weight: its spec, shapes, and which side the weight is."""
    labels = {"batch": "ab"[: draw(st.integers(0, 1))], "sum": "ijk"[: draw(st.integers(1, 3))]}
    labels |= {"x": "uv"[: draw(st.integers(0, 2))], "w": "pq"[: draw(st.integers(1, 2))]}
    sizes = {label: draw(st.integers(2, 4)) for part in labels.values() for label in part}
    x = draw(st.permutations(labels["batch"] + labels["sum"] + labels["x"]))
    w = draw(st.permutations(labels["batch"] + labels["sum"] + labels["w"]))
    out = draw(st.permutations(labels["batch"] + labels["x"] + labels["w"]))
    return [*map("".join, (x, w, out))], sizes, draw(st.booleans())


@pytest.mark.slow
@examples(8)
@given(einsums())
def test_any_einsum(case):
    (x, w, out), sizes, left = case
    spec = f"{w},{x}->{out}" if left else f"{x},{w}->{out}"

    def fn(weight, activation):
        return jnp.einsum(spec, *((weight, activation) if left else (activation, weight)))

    weight, activation = draw(*([sizes[label] for label in part] for part in (w, x)))
    plan, stored, adapters, run = prepared(fn, weight, activation, rule("int8"))
    one = plan.adapters["args[0]"]
    shared = set(x) & set(w)
    assert {w[i] for i in one.form.contracted} == shared - set(out)
    assert {w[i] for i in one.form.lead} == shared & set(out)
    operands = (merged(plan, stored, adapters), f64(activation))
    expected = np.einsum(spec, *(operands if left else operands[::-1]))
    close(run(stored, activation, adapters=adapters), expected)


def convolved(x, w, groups):
    """3x3, "SAME", NHWC and HWIO, in float64: a sum over the places of the window."""
    n, height, width, _ = x.shape
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    y = np.zeros((n, height, width, w.shape[-1]))
    size, outs = x.shape[-1] // groups, w.shape[-1] // groups
    for g in range(groups):
        for i in range(3):
            for j in range(3):
                part = padded[:, i : i + height, j : j + width, g * size : (g + 1) * size]
                y[..., g * outs : (g + 1) * outs] += part @ w[i, j, :, g * outs : (g + 1) * outs]
    return y


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_convolutions_of_groups(groups):
    def fn(w, x):
        return lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=LAYOUT, feature_group_count=groups
        )

    w, x = draw((3, 3, 4 // groups, 8), (2, 5, 6, 4))
    plan, stored, adapters, run = prepared(fn, w, x, rule("int8"))
    assert plan.adapters["args[0]"].shapes["a"] == (3, 3, 4 // groups, RANK)
    expected = convolved(f64(x), merged(plan, stored, adapters), groups)
    close(run(stored, x, adapters=adapters), expected)


@pytest.mark.slow
def test_two_layers_in_float64():
    """The formulas of the paper, with the gradient that reaches the first through the second."""
    params = dict(zip("uv", draw((6, 9), (9, 5)), strict=True))
    x, weight = draw((4, 6), (4, 5), seed=3)

    def fn(params, x):
        return x @ params["u"] @ params["v"]

    plan, stored, adapters, run = prepared(fn, params, x, rule("nf4"))
    gradient = jax.jit(
        jax.grad(lambda a: (run(stored, x, adapters=a) * weight).sum())
    )(adapters)  # fmt: skip
    w = merged(plan, stored, adapters)
    x, dy, s = f64(x), f64(weight), ALPHA / RANK
    (a1, b1), (a2, b2) = (
        (f64(adapters[f"args[0]['{n}']"]["a"]), f64(adapters[f"args[0]['{n}']"]["b"])) for n in "uv"
    )
    h = x @ w["u"]
    dh = dy @ w["v"].T
    close(gradient["args[0]['u']"]["a"], s * x.T @ dh @ b1.T)
    close(gradient["args[0]['u']"]["b"], s * (x @ a1).T @ dh)
    close(gradient["args[0]['v']"]["a"], s * h.T @ dy @ b2.T)
    close(gradient["args[0]['v']"]["b"], s * (h @ a2).T @ dy)


def test_activations_are_quantized_for_the_qvalue_alone():
    (w,), (x,) = draw((16, 8)), draw((4, 16), seed=1)
    both = rule("int8", act_qtype="int4")
    _, stored, adapters, run = prepared(lambda w, x: x @ w, w, x, both)
    scale = np.abs(f64(x)).max(axis=1, keepdims=True) / 7
    coarse = np.round(f64(x) / scale) * scale
    a, b = (f64(adapters["args[0]"][part]) for part in "ab")
    expected = coarse @ f64(stored) + ALPHA / RANK * f64(x) @ a @ b
    close(run(stored, x, adapters=adapters), expected)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_the_result_has_the_dtype_of_the_program(dtype):
    params, x = draw((16, 8), dtype=dtype)[0], draw((4, 16), dtype=dtype, seed=1)[0]
    plan, stored, adapters, run = prepared(lambda w, x: x @ w, params, x, rule("int8"))
    assert jax.tree.leaves(adapters)[0].dtype == jnp.float32
    y = run(stored, x, adapters=adapters)
    assert y.dtype == dtype
    expected = f64(x) @ merged(plan, stored, adapters)
    close(y, expected, 2e-2 if dtype == jnp.bfloat16 else 2e-5)


def looked_up(params, ids):
    return params["table"][ids] * 2


def test_lookups_alone_have_adapters_where_a_rule_names_them():
    params, ids = {"table": draw((16, 8))[0]}, jnp.asarray([[1, 4], [0, 15]])
    with pytest.warns(QuantizationWarning, match="rule 0 has no effect"):
        assert not PtqProvider(rule("int8")).plan(looked_up, params, ids).adapters
    named = rule("int8", op_names=["take"])
    plan, stored, adapters, run = prepared(looked_up, params, ids, named)
    path = "args[0]['table']"
    assert (plan.adapters[path].shapes["a"], plan.adapters[path].shapes["b"]) == (
        (16, RANK),
        (RANK, 8),
    )
    first = plan.init_adapters(jax.random.key(0))[path]
    assert not first["a"].any()  # as in loralib
    assert first["b"].all()
    expected = 2 * merged(plan, stored, adapters)["table"][np.asarray(ids)]
    close(jax.jit(lambda s, a: run(s, ids, adapters=a))(stored, adapters), expected)
    text = jax.jit(lambda s, a: run(s, ids, adapters=a)).lower(stored, adapters).compile().as_text()
    assert not re.search(r"f32\[16,8\]", text)  # neither dequantized nor multiplied out


# Forms in which the adapter can't be taken apart, or the parameter comes as an array.
ODD = {
    "elementwise, too": (lambda w, x: x @ w + (w * w).sum(), (8, 6)),
    "a slice": (lambda w, x: x @ w[:, :4] + (x @ w)[:, :4], (8, 6)),
    "concatenated": (lambda w, x: x @ w + x @ jnp.concatenate([w[:4], w[4:]]), (8, 6)),
    "merged kept and contracted": (
        lambda w, x: x @ w + jnp.sin(w.reshape(48) @ jnp.ones((48, 6))),
        (8, 6),
    ),
    "mapped over": (lambda w, x: jax.vmap(lambda m: x @ m)(w).sum(0), (3, 8, 6)),
    "twice in a row": (lambda w, x: (x @ w) @ w.T, (8, 6)),
    "broadcast": (
        lambda w, x: jnp.einsum("nbd,nde->nbe", jnp.stack([x, x]), jnp.broadcast_to(w, (2, 8, 6))),
        (8, 6),
    ),
}


@pytest.mark.parametrize("program", ODD)
@pytest.mark.filterwarnings("ignore::provider_xla.QuantizationWarning")
def test_other_uses_get_the_parameter_with_its_adapter(program):
    fn, shape = ODD[program]
    w, x = draw(shape, (4, 8))
    plan, stored, adapters, run = prepared(fn, w, x, rule("int8"))
    w = jnp.asarray(merged(plan, stored, adapters), jnp.float32)
    close(jax.jit(lambda s, a: run(s, x, adapters=a))(stored, adapters), fn(w, x), 1e-4)
    gradient = jax.grad(lambda a: run(stored, x, adapters=a).sum())(adapters)
    assert all(map(jnp.any, jax.tree.leaves(gradient)))


def test_a_gradient_inside_of_the_program():
    def fn(w, x):
        return jax.grad(lambda x: jnp.tanh(x @ w).sum())(x)

    w, x = draw((8, 6), (4, 8))
    plan, stored, adapters, run = prepared(fn, w, x, rule("int8"))
    expected = fn(jnp.asarray(merged(plan, stored, adapters), jnp.float32), x)
    close(run(stored, x, adapters=adapters), expected)


def test_a_kernel_of_a_convolution_with_several_axes_of_batch_groups():
    def fn(w, x):
        return lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=LAYOUT, batch_group_count=2
        )

    w, x = draw((3, 3, 4, 8), (2, 5, 6, 4))
    plan, stored, adapters, run = prepared(fn, w, x, rule("int8"))
    expected = fn(jnp.asarray(merged(plan, stored, adapters), jnp.float32), x)
    close(run(stored, x, adapters=adapters), expected)
