"""Bad input is an error that names the op and the argument: of Python, and of the handlers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import te_ffi_kernels as te
from te_ffi_kernels import reference

pytestmark = pytest.mark.sample(2)

X = jnp.ones((4, 12))
MAP = jnp.ones((4, 12), bool)
COUNTS = jnp.ones((12,), jnp.int32)
BUF = jnp.ones((2,))
BOTH = [te, reference]

BAD = [
    ({"logits": X.astype(jnp.int32)}, TypeError, "logits must.*got int32"),
    ({"logits": X[0, 0]}, ValueError, r"logits must.*got .*\(\)"),
    ({"topk": 0}, ValueError, "topk must.*got 0"),
    ({"topk": 13}, ValueError, "topk must not be above the number of experts, 12.*got 13"),
    ({"topk": 2.0}, TypeError, "topk must.*got float"),
    ({"group_topk": 3, "num_groups": 3}, ValueError, "group_topk must divide topk, 4.*got 3"),
    ({"group_topk": 2, "num_groups": 1}, ValueError, "num_groups must be at least.*got 1"),
    ({"group_topk": 2, "num_groups": 5}, ValueError, "num_groups must divide.*got 5"),
    (
        {"group_topk": 1, "num_groups": 6},
        ValueError,
        "topk / group_topk must.*the 2 experts.*got 4 / 1",
    ),
    ({"scaling_factor": X}, TypeError, "scaling_factor must "),
    ({"score_function": "tanh"}, ValueError, "score_function must .*SQRTSOFTPLUS.*got 'tanh'"),
    ({"score_function": 3}, ValueError, "score_function must.*got 3"),
    ({"routing_map_format": "bits"}, ValueError, "routing_map_format must .*BITMAP_U8.*got 'bits'"),
    ({"expert_bias": X[0]}, ValueError, "expert_bias must be None with score_function SOFTMAX"),
    (
        {"expert_bias": X[0, 1:], "score_function": "sigmoid"},
        ValueError,
        r"expert_bias must.*got .*\(11,\)",
    ),
    (
        {"expert_bias": COUNTS, "score_function": "sigmoid"},
        TypeError,
        "expert_bias must.*got int32",
    ),
]


@pytest.mark.parametrize("module", BOTH)
@pytest.mark.parametrize(("given", "error", "message"), BAD)
def test_choice(module, given, error, message):
    with pytest.raises(error, match=f"fused_topk_with_score_function: {message}"):
        module.fused_topk_with_score_function(**({"logits": X, "topk": 4} | given))


@pytest.mark.parametrize("module", BOTH)
@pytest.mark.parametrize(
    ("at", "given", "error", "message"),
    [
        (0, MAP[:, 1:], ValueError, r"routing_map must.*got .*\(4, 11\)"),
        (0, COUNTS, TypeError, "routing_map must.*got int32"),
        (1, X.astype(jnp.float16), TypeError, "saved_scores must.*got float16"),
        (1, X[1:], ValueError, r"saved_scores must.*got .*\(3, 12\)"),
        (2, COUNTS, TypeError, "grad_probs must.*got int32"),
        (3, 13, ValueError, "topk must.*got 13"),
        (8, 1, TypeError, "routing_map must.*got bool"),
    ],
)
def test_gradient_of_the_choice(module, at, given, error, message):
    args = [MAP, X, X, 4, False, 1.0, 1, False, 0]
    args[at] = given
    with pytest.raises(error, match=f"fused_topk_with_score_function_bwd: {message}"):
        module.fused_topk_with_score_function_bwd(*args)


@pytest.mark.parametrize("module", BOTH)
@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((COUNTS, COUNTS, 4, 1.0), TypeError, "probs must.*got int32"),
        ((X[0], COUNTS, 4, 1.0), ValueError, r"probs must.*got .*\(12,\)"),
        ((X, COUNTS.astype(jnp.uint8), 4, 1.0), TypeError, "tokens_per_expert must.*got uint8"),
        ((X, COUNTS[1:], 4, 1.0), ValueError, r"tokens_per_expert must.*got .*\(11,\)"),
        ((X, COUNTS, 0, 1.0), ValueError, "topk must.*got 0"),
        ((X, COUNTS, 4, "1"), TypeError, "coeff must.*got str"),
    ],
)
def test_loss(module, args, error, message):
    for op in ("fused_moe_aux_loss", "fused_moe_aux_loss_fwd"):
        with pytest.raises(error, match=f"{op}: {message}"):
            getattr(module, op)(*args)


@pytest.mark.parametrize("module", BOTH)
@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        (
            (X[0, :2].astype(jnp.float16), COUNTS, X[0, 0], 4),
            TypeError,
            "const_buf must.*got float16",
        ),
        ((X[0], COUNTS, X[0, 0], 4), ValueError, r"const_buf must.*got .*\(12,\)"),
        ((BUF, COUNTS[None], X[0, 0], 4), ValueError, r"tokens_per_expert must.*got .*\(1, 12\)"),
        ((BUF, COUNTS, X[0], 4), ValueError, r"grad_aux_loss must.*got .*\(12,\)"),
        ((BUF, COUNTS, X[0, 0], -1), ValueError, "num_tokens must.*got -1"),
    ],
)
def test_gradient_of_the_loss(module, args, error, message):
    with pytest.raises(error, match=f"fused_moe_aux_loss_bwd: {message}"):
        module.fused_moe_aux_loss_bwd(*args)


# What follows calls the targets themselves, as another front end would.

NONE = jnp.zeros((0,))
BACKWARD = {
    "topk": 4,
    "use_pre_softmax": 0,
    "scaling_factor": np.float64(1),
    "score_function": 1,
    "compute_aux_scores": 0,
    "routing_map_format": 0,
}
FORWARD = BACKWARD | {"num_groups": -1, "group_topk": -1}
F32 = jnp.float32


def target(name, results, operands, **attributes):
    te.register()
    results = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results]
    call = jax.ffi.ffi_call(f"te_ffi_kernels.{name}", results)
    return jax.block_until_ready(call(*operands, **attributes))


def fails(message, name, *args, **attributes):
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"te_ffi_kernels.{name}: {message}"):
        target(name, *args, **attributes)


@pytest.mark.slow
def test_forward_target():
    results = [((4, 12), F32), ((4, 12), bool), ((4, 12), F32)]
    name = "fused_topk_with_score_function_forward"
    found = target(name, results, (X, NONE), **FORWARD)
    np.testing.assert_array_equal(found[1], np.arange(12)[None] < np.full((4, 1), 4))

    def refuses(message, logits=X, bias=NONE, at=None, result=None, without=None, **attributes):
        changed = [result if i == at else one for i, one in enumerate(results)]
        given = {k: v for k, v in (FORWARD | attributes).items() if k != without}
        fails(message, name, changed, (logits, bias), **given)

    refuses("attribute topk is missing", without="topk")
    refuses("topk must.*got 0", topk=0)
    refuses("topk must.*got 13", topk=13)
    refuses("score_function must.*got 7", score_function=7)
    refuses("routing_map_format must.*got 2", routing_map_format=2)
    refuses("group_topk must.*got 3", group_topk=3, num_groups=4)
    refuses("num_groups must.*got 5", group_topk=2, num_groups=5)
    refuses("logits must.*got int32", logits=X.astype(jnp.int32))
    refuses("expert_bias must be empty.*got float32", bias=X[0])
    refuses("expert_bias must .*12 numbers.*got float32", bias=X[0, 1:], score_function=0)
    refuses("probs must.*got bfloat16", at=0, result=((4, 12), jnp.bfloat16))
    refuses("probs must.*got float32", at=0, result=((4, 11), F32))
    refuses("routing_map must.*got float32", at=1, result=((4, 12), F32))
    refuses("routing_map must.*got bool.4, 11", at=1, result=((4, 11), bool))
    refuses("routing_map must.*got bool", routing_map_format=1)
    refuses("intermediate_output must.*got int32", at=2, result=((4, 12), jnp.int32))


def test_backward_target():
    results, name = [((4, 12), F32)], "fused_topk_with_score_function_backward"
    found = target(name, results, (MAP, X / 12, X), **BACKWARD)
    np.testing.assert_allclose(found[0], np.zeros((4, 12)), atol=1e-7)
    fails("attribute topk", name, results, (MAP, X, X))
    fails("routing_map must.*got int32", name, results, (COUNTS, X, X), **BACKWARD)
    fails("routing_map must have 48 numbers", name, results, (MAP[1:], X, X), **BACKWARD)
    fails("intermediate_output must", name, results, (MAP, X[1:], X), **BACKWARD)
    fails("grad_probs must.*got int32", name, results, (MAP, X, COUNTS), **BACKWARD)
    fails("grad_logits must", name, [((4, 11), F32)], (MAP, X, X), **BACKWARD)


def test_loss_targets():
    results, name = [((), F32), ((2,), F32)], "fused_moe_aux_loss_forward"
    given = {"topk": 4, "coeff": np.float64(1)}
    found = target(name, results, (X, COUNTS), **given)
    np.testing.assert_allclose(found[0], 12 / 4 / 16 * 48, rtol=1e-6)
    fails("attribute coeff", name, results, (X, COUNTS), topk=4)
    fails("topk must.*got 0", name, results, (X, COUNTS), **given | {"topk": 0})
    fails("probs must.*got int32", name, results, (COUNTS[None], COUNTS), **given)
    fails("probs must be.*got float32.12.", name, results, (X[0], COUNTS), **given)
    fails("tokens_per_expert must.*got bool", name, results, (X, COUNTS > 0), **given)
    fails("tokens_per_expert must.*got int32.11", name, results, (X, COUNTS[1:]), **given)
    fails("aux_loss must", name, [((2,), F32), results[1]], (X, COUNTS), **given)
    fails("const_buf must", name, [results[0], ((1,), F32)], (X, COUNTS), **given)
    name, results, one = "fused_moe_aux_loss_backward", [((4, 12), F32)], jnp.ones(())
    np.testing.assert_array_equal(target(name, results, (BUF, COUNTS, one))[0], X)
    fails("const_buf must", name, results, (X, COUNTS, one))
    fails("tokens_per_expert must", name, results, (BUF, COUNTS[1:], one))
    fails("grad_aux_loss must.*got float32.12", name, results, (BUF, COUNTS, X[0]))
    fails("grad_probs must.*got int32", name, [((4, 12), jnp.int32)], (BUF, COUNTS, one))
