"""Named functions of models, computed by kernels where a rule asks for it."""

import itertools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import provider_xla as xla

pytestmark = pytest.mark.sample(2)

FUSED = xla.QuantizationRule(kernel="fused")
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(2, 7, 12)), jnp.float32)
MASK = jnp.asarray(RNG.random((2, 1, 7, 7)) < 0.7).at[..., 0].set(True)
W = jnp.asarray(RNG.normal(size=12), jnp.float32)


def heads(x):
    return x.reshape(2, 7, 3, 4)


CALLS = {
    "softmax": lambda w, x: jax.nn.softmax(x * w),
    "softmax of one axis": lambda w, x: jax.nn.softmax(x * w, axis=1),
    "softmax of a vector": lambda w, x: jax.nn.softmax(x[0, 0] * w),
    "gelu": lambda w, x: jax.nn.gelu(x * w),
    "silu": lambda w, x: jax.nn.silu(x * w),
    "silu of a vector": lambda w, x: jax.nn.silu(x[0, 0] * w),
    "standardize": lambda w, x: jax.nn.standardize(x * w),
    "attention": lambda w, x: jax.nn.dot_product_attention(heads(x * w), heads(x), heads(x)),
    "causal attention": lambda w, x: jax.nn.dot_product_attention(
        heads(x * w), heads(x), heads(x), is_causal=True, scale=0.3
    ),
    "local attention": lambda w, x: jax.nn.dot_product_attention(
        heads(x * w), heads(x), heads(x), local_window_size=(2, 1)
    ),
    "masked attention": lambda w, x: jax.nn.dot_product_attention(
        heads(x * w), heads(x), heads(x), x[:, None, :, :7], MASK
    ),
    "grouped attention": lambda w, x: jax.nn.dot_product_attention(
        heads(x * w), heads(x)[:, :5, :1], heads(x)[:, :5, :1], mask=MASK[:1, :, :1, :5]
    ),
    "attention without a batch": lambda w, x: jax.nn.dot_product_attention(
        heads(x * w)[0], heads(x)[0], heads(x)[0], mask=MASK[0]
    ),
    "attention over a cache": lambda w, x: jax.nn.dot_product_attention(
        heads(x * w)[:, :1],
        heads(x),
        heads(x),
        mask=MASK[:, :, :1],
        key_value_seq_lengths=jnp.array([7, 3]),
    ),
    "flax's attention": lambda w, x: nn.dot_product_attention(
        heads(x * w), heads(x), heads(x), mask=MASK
    ),
}
NAMES = {"standardize": "layer_norm"}


def planned(fn, *args, rules=FUSED):
    provider = xla.PtqProvider(rules, strict=True)
    return provider.plan(fn, *args), provider.apply(fn)


def with_gradients(functions):
    @jax.jit
    def run(w, x):
        def slopes(fn):
            return jax.grad(lambda w, x: jnp.sum(jnp.sin(fn(w, x))), (0, 1))(w, x)

        return {name: (fn(w, x), slopes(fn)) for name, fn in functions.items()}

    return run(W, X)


@pytest.mark.slow
def test_functions_and_their_gradients():
    functions = {}
    for name, fn in CALLS.items():
        plan, functions[name] = planned(fn, W, X)
        (record,) = plan.ops
        expected = next(n for n in ("attention", *NAMES, "softmax", "gelu", "silu") if n in name)
        assert record.op_name == NAMES.get(expected, expected)
        assert record.kernel.startswith("te_ffi_kernels.")
        assert record.kernel in str(plan)
        text = jax.jit(functions[name]).lower(W, X).as_text()
        assert f"@{record.kernel}" in text
    found, wanted = with_gradients(functions), with_gradients(CALLS)
    for name in CALLS:
        (y, slopes), (exact, theirs) = found[name], wanted[name]
        np.testing.assert_allclose(y, exact, rtol=2e-5, atol=2e-6, err_msg=name)
        for one, other in zip(slopes, theirs, strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5, err_msg=name)


TOGETHER = {
    "split": lambda x: jnp.split(x.reshape(2, 12, 9, 4), 3, axis=2),
    "last axis": lambda x: [part.reshape(2, 12, 3, 4) for part in jnp.split(x, 3, axis=-1)],
    "indexed": lambda x: [x.reshape(2, 12, 3, 3, 4)[:, :, i] for i in range(3)],
    "another order": lambda x: jnp.split(x.reshape(2, 12, 9, 4), 3, axis=2)[::-1],
}


@pytest.mark.slow
def test_attention_reads_queries_keys_and_values_in_one_array():
    x = jnp.asarray(RNG.normal(size=(2, 12, 12)), jnp.float32)
    w = jnp.asarray(RNG.normal(size=(12, 36)), jnp.float32)
    seen = jnp.asarray(RNG.random((2, 1, 1, 12)) < 0.7).at[..., 0].set(True)
    for name, cut in TOGETHER.items():

        def fn(w, x, cut=cut):
            return jax.nn.dot_product_attention(*cut(x @ w + 1), mask=seen)

        _, fused = planned(fn, w, x)
        text = jax.jit(fused).lower(w, x).as_text()
        assert ("tensor<2x12x3x3x4xf32>" in text) == (name != "another order")
        np.testing.assert_allclose(jax.jit(fused)(w, x), fn(w, x), rtol=2e-5, atol=2e-6)
        ours, theirs = (jax.grad(lambda w, of=of: (of(w, x) ** 2).sum())(w) for of in (fused, fn))
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-4)


# JAX has no attention in float16 on CPU to compare with.
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *itertools.product(["softmax", "gelu", "silu", "standardize"], [jnp.bfloat16, jnp.float16]),
        ("masked attention", jnp.bfloat16),
        ("attention over a cache", jnp.bfloat16),
    ],
)
def test_narrow_floats_are_no_worse_than_in_jax(name, dtype):
    fn = CALLS[name]
    w, x = W.astype(dtype), X.astype(dtype)
    wide = np.asarray(fn(w.astype(jnp.float32), x.astype(jnp.float32)), np.float64)
    _, fused = planned(fn, w, x)
    found = jax.jit(fused)(w, x)
    assert found.dtype == dtype
    error, theirs = (
        np.abs(np.asarray(y, np.float64) - wide).max() for y in (found, jax.jit(fn)(w, x))
    )
    assert error <= max(1.1 * theirs, float(jnp.finfo(dtype).eps) * np.abs(wide).max())


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm(epsilon=1e-3, bias_init=nn.initializers.normal())(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=3)(x, x)
        return nn.RMSNorm(scale_init=nn.initializers.normal())(x)


class Nnx(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.norm = nnx.LayerNorm(12, use_bias=False, rngs=rngs)
        self.attend = nnx.MultiHeadAttention(3, 12, rngs=rngs, decode=False)
        self.last = nnx.RMSNorm(12, rngs=rngs)

    def __call__(self, x):
        x = self.norm(x)
        return self.last(x + self.attend(x))


def linen_model():
    module = Linen()
    return module.apply, module.init(jax.random.key(0), X)


def nnx_model():
    graph, state = nnx.split(Nnx())
    return lambda state, x: nnx.merge(graph, state)(x), state


def equinox_model():
    modules = [eqx.nn.LayerNorm(12), eqx.nn.RMSNorm(12, use_bias=False)]
    arrays, rest = eqx.partition(modules, eqx.is_array)

    def fn(arrays, x):
        first, last = eqx.combine(arrays, rest)
        return jax.vmap(jax.vmap(lambda row: last(first(row))))(x)

    return fn, arrays


MODELS = {"linen": linen_model, "nnx": nnx_model, "equinox": equinox_model}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", MODELS)
def test_modules_of_frameworks(name):
    fn, params = MODELS[name]()
    plan, fused = planned(fn, params, X)
    kernels = [record.op_name for record in plan.ops if record.kernel]
    assert sorted(kernels) == sorted(
        ["layer_norm", "rms_norm"] + (["attention"] if name != "equinox" else [])
    )
    np.testing.assert_allclose(jax.jit(fused)(params, X), fn(params, X), rtol=2e-5, atol=2e-6)

    def slopes(fn):
        return jax.grad(lambda params: jnp.sum(jnp.sin(fn(params, X))), allow_int=True)(params)

    for ours, theirs in zip(
        jax.tree.leaves(slopes(fused)), jax.tree.leaves(slopes(fn)), strict=True
    ):
        if jnp.issubdtype(theirs.dtype, jnp.floating):
            np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5)


def model(params, x):
    with jax.named_scope("first"):
        x = jax.nn.gelu(x @ params["up"])
    with jax.named_scope("second"):
        return jax.nn.softmax(x @ params["down"])


PARAMS = {"up": jnp.ones((12, 24)) * 0.1, "down": jnp.eye(24)}


def test_beside_quantized_contractions():
    rules = [FUSED, xla.QuantizationRule(weight_qtype="int8", act_qtype="int8")]
    plan, _ = planned(model, PARAMS, X, rules=rules)
    assert [(r.op_name, r.quantized, r.rule) for r in plan.ops] == [
        ("matmul", True, 1),
        ("gelu", False, 0),
        ("matmul", True, 1),
        ("softmax", False, 0),
    ]


def test_a_rule_can_do_both_or_name_one():
    both = xla.QuantizationRule(weight_qtype="int8", act_qtype="int8", kernel="fused")
    plan, _ = planned(model, PARAMS, X, rules=both)
    assert [r.quantized or r.kernel is not None for r in plan.ops] == [True] * 4
    rules = [xla.QuantizationRule(op_names=["gelu"], module_path="first", kernel="fused")]
    plan, _ = planned(model, PARAMS, X, rules=rules)
    assert [r.op_name for r in plan.ops if r.kernel] == ["gelu"]
    off = [xla.QuantizationRule(op_names=["softmax"], module_path="second"), FUSED]
    plan, _ = planned(model, PARAMS, X, rules=off)
    assert [r.op_name for r in plan.ops if r.kernel] == ["gelu"]


@pytest.mark.slow
def test_training_with_kernels():
    provider = xla.QtProvider(xla.QtRule(weight_qtype="int8", act_qtype="int8", kernel="fused"))
    plain = xla.QtProvider(xla.QtRule(weight_qtype="int8", act_qtype="int8"))

    def slopes(provider):
        fn = provider.apply(model)
        return jax.jit(jax.grad(lambda params: jnp.sum(fn(params, X) ** 2)))(PARAMS)

    for name, found in slopes(provider).items():
        np.testing.assert_allclose(found, slopes(plain)[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda w, x: jax.nn.gelu(x, approximate=False), "exact gelu"),
        (lambda w, x: jax.nn.softmax(x, where=x > 0, axis=-1), "where is given"),
        (lambda w, x: jax.nn.softmax(x, axis=(1, 2)), "other axes"),
        (lambda w, x: jax.nn.silu(x.astype(jnp.float8_e5m2)), "float8_e5m2"),
        (
            lambda w, x: jax.nn.dot_product_attention(
                heads(x), heads(x), heads(x), query_seq_lengths=jnp.array([3, 7])
            ),
            "query_seq_lengths",
        ),
    ],
)
def test_what_kernels_do_not_compute_stays_as_it_was(fn, reason):
    provider = xla.PtqProvider(FUSED)
    with pytest.warns(xla.QuantizationWarning, match=reason):
        plan = provider.plan(fn, W, X)
    assert [record.kernel for record in plan.ops] == [None]
    found, expected = jax.jit(provider.apply(fn))(W, X), jax.jit(fn)(W, X)
    np.testing.assert_array_equal(found, expected)


def test_a_wrong_call_fails_as_it_did():
    def wrong(w, x):
        return jax.nn.dot_product_attention(heads(x), heads(x)[..., :3], heads(x))

    with pytest.raises(Exception) as theirs:
        wrong(W, X)
    with pytest.raises(type(theirs.value)) as ours:
        xla.PtqProvider(FUSED).apply(wrong)(W, X)
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"kernel": "flash"}, "kernel must be None or 'fused'"), ({"op_names": ["erf"]}, "softmax")],
)
def test_bad_rules(fields, message):
    with pytest.raises(ValueError, match=message):
        xla.QuantizationRule(**fields)
