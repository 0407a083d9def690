"""The router: numbers, against NumPy in float64 and the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import te_ffi_kernels as te
from jaxtap_testkit.te import router as expected
from te_ffi_kernels import RoutingMapFormat, ScoreFunction, reference

pytestmark = pytest.mark.sample(2)

FUNCTIONS = ["softmax", "sigmoid", "sqrtsoftplus"]
STEPS = {"float32": 4e-6, "bfloat16": 5e-3, "float16": 8e-4}


def distinct(tokens, experts, dtype):
    """Logits that differ by more than scores are off: the choice is no matter of rounding."""
    row = np.arange(experts) / 64 - experts / 128
    rng = np.random.default_rng()
    return jnp.asarray(rng.permuted(np.tile(row, (tokens, 1)), axis=1), dtype)


CASES = [
    # dtype, experts, topk, before, bias, groups, group_topk, scaling, format
    (jnp.float32, 64, 8, False, False, -1, -1, 1.0, "bytemap"),
    (jnp.float32, 37, 3, True, True, 0, 0, 2.5, "bitmap_u8"),
    (jnp.bfloat16, 128, 8, False, True, 8, 4, 1.5, "bytemap"),
    (jnp.float16, 60, 6, True, False, 5, 3, 1.0, "bitmap_u8"),
    (jnp.float32, 20, 1, False, True, -1, -1, 0.5, "bytemap"),
    (jnp.float32, 9, 9, True, False, -1, -1, 1.0, "bitmap_u8"),
]


@pytest.mark.parametrize(
    ("number", "function"),
    [(i, FUNCTIONS[i % 3]) for i in range(len(CASES))] + [(1, "sigmoid"), (2, "softmax")],
)
def test_against_float64_and_the_reference(number, function):
    dtype, experts, topk, before, has_bias, groups, group_topk, scaling, layout = CASES[number]
    rng = np.random.default_rng()
    x = distinct(11, experts, dtype)
    bias = None
    if has_bias and function != "softmax":
        bias = jnp.asarray(rng.permutation(experts) / 50, jnp.bfloat16)
    grad = jnp.asarray(rng.normal(size=x.shape), dtype)

    @jax.jit
    def both(x, bias, grad):
        found = []
        for module in (te, reference):

            def fn(x, module=module):
                return module.fused_topk_with_score_function(
                    x, topk, before, groups, group_topk, scaling, function, bias, False, layout
                )

            probs, pull, routing_map = jax.vjp(fn, x, has_aux=True)
            found.append((probs, routing_map, pull(grad)[0]))
        return found

    before = before and function == "softmax"
    in_groups = {"groups": groups, "group_topk": group_topk}
    mask = expected.chosen(x, topk, function, before=before, bias=bias, **in_groups)
    options = {"function": function, "before": before, "scaling": scaling}
    wanted = expected.weights(x, mask, **options)
    slope = expected.gradient(x, mask, grad, **options)
    step = STEPS[jnp.dtype(dtype).name]
    for probs, routing_map, found_slope in both(x, bias, grad):
        assert (probs.shape, probs.dtype) == (x.shape, x.dtype)
        if layout == "bytemap":
            assert routing_map.dtype == jnp.bool_
            np.testing.assert_array_equal(routing_map, mask)
        else:
            assert routing_map.dtype == jnp.uint8
            np.testing.assert_array_equal(routing_map, expected.packed(mask))
        close(probs, wanted, step, 1e-7)
        assert (found_slope.shape, found_slope.dtype) == (x.shape, x.dtype)
        close(found_slope, slope, step, 4 * step * float(np.abs(wanted).max()))


def close(found, wanted, relative, absolute):
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=relative, atol=absolute)


@pytest.mark.parametrize(
    ("dtype", "function"),
    [(jnp.float32, "softmax"), (jnp.bfloat16, "sigmoid"), (jnp.float32, "sqrtsoftplus")],
)
def test_scores_for_the_loss(dtype, function):
    x = distinct(9, 33, dtype)
    grad = jnp.asarray(np.random.default_rng().normal(size=x.shape), dtype)

    @jax.jit
    def both(x, grad):
        found = []
        for module in (te, reference):

            def fn(x, module=module):
                return module.fused_topk_with_score_function(
                    x, 4, True, 3, 2, 7.0, function, None, True
                )

            scores, pull, routing_map = jax.vjp(fn, x, has_aux=True)
            found.append((scores, routing_map, pull(grad)[0]))
        return found

    mask = expected.chosen(x, 4, function)
    options = {"function": function, "dense": True}
    step = STEPS[jnp.dtype(dtype).name]
    for scores, routing_map, slope in both(x, grad):
        assert scores.dtype == x.dtype
        np.testing.assert_array_equal(routing_map, mask)
        close(scores, expected.weights(x, mask, **options), step, 1e-7)
        close(slope, expected.gradient(x, mask, grad, **options), step, 2 * step)


def test_errors_are_those_of_plain_jax():
    x = jnp.asarray(np.random.default_rng().normal(size=(1024, 128)) * 4, jnp.float32)

    def plain(x):
        scores = jax.nn.softmax(x)
        top, at = jax.lax.top_k(scores, 8)
        return jnp.put_along_axis(jnp.zeros_like(x), at, top, -1, inplace=False)

    found = te.fused_topk_with_score_function(x, 8, True)[0]
    mask = expected.chosen(x, 8, "softmax")
    wanted = expected.weights(x, mask, "softmax", before=True)[mask]
    error, other = (
        np.sqrt(np.mean((np.asarray(y, np.float64)[mask] / wanted - 1) ** 2))
        for y in (found, jax.jit(plain)(x))
    )
    assert error <= 1.2 * other


@pytest.mark.slow
def test_ties_and_what_is_not_finite():
    inf, nan = jnp.inf, jnp.nan
    x = jnp.asarray(
        [[1.0] * 6, [0, 2, 2, 0, 2, 2], [-inf, 0, -inf, -inf, -inf, 1], [0, nan, 1, 2, 3, 4]]
    )
    for module in (te, reference):
        probs, routing_map = module.fused_topk_with_score_function(x, 3)
        wanted = [[1, 1, 1, 0, 0, 0], [0, 1, 1, 0, 1, 0], [1, 1, 0, 0, 0, 1], [0, 1, 0, 0, 1, 1]]
        np.testing.assert_array_equal(routing_map, np.asarray(wanted, bool))
        np.testing.assert_allclose(probs[0, :3], [1 / 3] * 3, rtol=1e-6)
        assert probs[2, 0] == 0
        assert np.isnan(np.asarray(probs[3])[[1, 4, 5]]).all()
        assert not np.asarray(probs[3])[[0, 2, 3]].any()


def test_a_bias_moves_the_choice_alone():
    x = jnp.zeros((2, 5)) + jnp.asarray([[0.0], [3.0]])
    bias = jnp.asarray([0.0, 0.3, -1.0, 0.2, 0.1])
    probs, routing_map = te.fused_topk_with_score_function(
        x, 2, score_function=ScoreFunction.SIGMOID, expert_bias=bias
    )
    wanted = np.asarray([[0, 1, 0, 1, 0]] * 2)
    np.testing.assert_array_equal(routing_map, wanted == 1)
    np.testing.assert_allclose(probs, wanted / 2, rtol=1e-6)


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", list(RoutingMapFormat))
def test_functions_of_the_primitives(layout):
    x = distinct(7, 24, jnp.float32)
    grad = jnp.asarray(np.random.default_rng().normal(size=x.shape), jnp.float32)
    none = jnp.zeros((0,), x.dtype)

    @jax.jit
    def run(x, grad):
        found = []
        for module in (te, reference):
            out = module.fused_topk_with_score_function_fwd(
                x, 4, False, -1, -1, 1.5, 1, none, False, layout
            )
            slope = module.fused_topk_with_score_function_bwd(
                out[1], out[2], grad, 4, False, 1.5, 1, False, layout
            )

            def fn(x):
                return te.fused_topk_with_score_function(
                    x, 4, scaling_factor=1.5, routing_map_format=layout
                )

            probs, pull, routing_map = jax.vjp(fn, x, has_aux=True)
            found.append((out, slope, probs, routing_map, pull(grad)[0]))
        return found

    for (probs, routing_map, saved), slope, *wanted in run(x, grad):
        np.testing.assert_allclose(probs, wanted[0], rtol=1e-5)
        np.testing.assert_array_equal(routing_map, wanted[1])
        np.testing.assert_allclose(slope, wanted[2], rtol=1e-5, atol=1e-6)
        gone = np.isneginf(saved)
        np.testing.assert_array_equal(~gone, expected.chosen(x, 4, "softmax"))
        np.testing.assert_allclose(np.asarray(saved)[~gone].reshape(7, 4).sum(1), 1, rtol=1e-6)


def test_empty():
    probs, routing_map = te.fused_topk_with_score_function(
        jnp.zeros((0, 10)), 2, routing_map_format=1
    )
    assert (probs.shape, routing_map.shape) == ((0, 10), (0, 2))
    loss = te.fused_moe_aux_loss(jnp.zeros((0, 10)), jnp.zeros((10,), jnp.int32), 2, 1.0)
    assert loss == 0


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("dtype", "counts"),
    [(jnp.float32, jnp.int32), (jnp.bfloat16, jnp.float32), (jnp.float16, jnp.int16)],
)
def test_loss(dtype, counts):
    rng = np.random.default_rng()
    probs = jnp.asarray(rng.random((301, 24)), dtype)
    tokens = jnp.asarray(rng.integers(0, 100, 24), counts)

    @jax.jit
    def run(probs, tokens):
        found = []
        for module in (te, reference):
            loss, slope = jax.value_and_grad(module.fused_moe_aux_loss)(probs, tokens, 4, 0.1)
            by_hand, saved = module.fused_moe_aux_loss_fwd(probs, tokens, 4, 0.1)
            one = jnp.ones((), dtype)
            found.append(
                (
                    loss,
                    slope,
                    by_hand,
                    saved,
                    module.fused_moe_aux_loss_bwd(saved, tokens, one, 301),
                )
            )
        return found

    wanted = expected.loss(np.asarray(probs, np.float64), tokens, 4, 0.1)
    scale = 24 * 0.1 / (4 * 301**2)
    row = np.asarray(tokens, np.float64) * scale
    step = STEPS[jnp.dtype(dtype).name]
    for loss, slope, by_hand, saved, other in run(probs, tokens):
        assert (loss.dtype, slope.dtype, saved.dtype) == (dtype, dtype, jnp.float32)
        close(loss, wanted, step, 0)
        close(by_hand, wanted, step, 0)
        close(saved, [scale, wanted], 1e-6, 0)
        for one in (slope, other):
            close(one, np.tile(row, (301, 1)), step, 6e-8)


def test_it_is_the_kernel_that_runs():
    def loss(x):
        scores, _ = te.fused_topk_with_score_function(x, 2, compute_aux_scores=True)
        probs, _ = te.fused_topk_with_score_function(x, 2)
        counts = jnp.ones((8,), jnp.int32)
        return te.fused_moe_aux_loss(scores, counts, 2, 1.0) + (probs[:, 0]).sum()

    text = jax.jit(jax.grad(loss)).lower(jnp.ones((4, 8))).compile().as_text()
    for name in ("fused_topk_with_score_function", "fused_moe_aux_loss"):
        assert f'"te_ffi_kernels.{name}_backward"' in text
    assert '"te_ffi_kernels.fused_topk_with_score_function_forward"' in text
