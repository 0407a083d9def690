"""token_dispatch and token_combine against loops in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import te_ffi_kernels as te
from jaxtap_testkit.meshes import put
from jaxtap_testkit.numbers import normal
from te_ffi_kernels import reference

TOKENS, EXPERTS, HIDDEN = 11, 5, 6


def routing(tokens=TOKENS, seed=0):
    """Return a map in which one expert has no token, and one token no expert."""
    routed = np.random.default_rng(seed).random((tokens, EXPERTS)) < 0.5
    routed[:, 3] = routed[2] = False
    return routed


def places(routed, align):
    """Return [(row, token, expert)], and how many rows each expert has."""
    found, sizes, start = [], [], 0
    for expert in range(EXPERTS):
        tokens = np.flatnonzero(routed[:, expert])
        found += [(start + i, token, expert) for i, token in enumerate(tokens)]
        sizes.append(-(-len(tokens) // align) * align)
        start += sizes[-1]
    return found, sizes


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_there_and_back(dtype):
    x, probs, routed = normal(TOKENS, HIDDEN, dtype=dtype), normal(TOKENS, EXPERTS), routing()
    total = int(routed.sum())
    for align, given in ((None, probs), (4, probs.astype(dtype)), (1, None), (16, None)):
        where, sizes = places(routed, align or 1)
        rows = total if align is None else (total + EXPERTS * (align - 1)) // align * align
        wanted, wanted_probs = np.zeros((rows, HIDDEN)), np.zeros(rows)
        sums = np.zeros((TOKENS, HIDDEN))
        for row, token, expert in where:
            wanted[row] = np.asarray(x[token], np.float64)
            factor = 1.0 if given is None else float(given[token, expert])
            wanted_probs[row] = factor
            sums[token] += factor * wanted[row]
        modules = te, reference

        @jax.jit
        def run(x, routed, given, modules=modules, total=total, align=align):
            sent = [one.token_dispatch(x, routed, total, given, align) for one in modules]
            return [
                (*out, one.token_combine(out[0], out[2], given, out[3]))
                for one, out in zip(modules, sent, strict=True)
            ]

        for out, moved, row_map, offsets, counts, back in run(x, jnp.asarray(routed), given):
            assert (out.dtype, out.shape) == (dtype, wanted.shape)
            np.testing.assert_array_equal(np.asarray(out, np.float64), wanted)
            if given is None:
                assert moved is None
            else:
                np.testing.assert_array_equal(np.asarray(moved, np.float64), wanted_probs)
            np.testing.assert_array_equal(counts, sizes)
            assert (offsets is None) == (align is None)
            assert row_map.shape == (TOKENS, 2 * EXPERTS + 1)
            np.testing.assert_array_equal(row_map[:, -1], routed.sum(1))
            step = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
            np.testing.assert_allclose(np.asarray(back, np.float64), sums, rtol=step, atol=step)


def test_integer_maps_and_more_axes():
    x, routed = normal(2, 4, HIDDEN), routing(8).reshape(2, 4, EXPERTS)
    wanted = te.token_dispatch(x.reshape(8, HIDDEN), jnp.asarray(routed.reshape(8, EXPERTS)), 20)
    for dtype in ("int32", "uint8", "bool"):
        found = te.token_dispatch(x, jnp.asarray(routed.astype(dtype)), 20)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(one, other)


def test_rows_that_there_is_no_room_for_are_left_out():
    x, routed = normal(TOKENS, HIDDEN), jnp.asarray(routing())
    whole = te.token_dispatch(x, routed, int(routed.sum()))[0]
    for module in (te, reference):
        few, _, row_map, *_ = module.token_dispatch(x, routed, 7)
        np.testing.assert_array_equal(few, whole[:7])
        sums = np.zeros((TOKENS, HIDDEN), np.float32)
        for row, token, _ in places(np.asarray(routed), 1)[0]:
            sums[token] += np.asarray(few[row]) if row < 7 else 0
        np.testing.assert_allclose(module.token_combine(few, row_map), sums, rtol=1e-6)


def layer(x, probs, weight, routed, align, module):
    """Multiply rows with numbers of theirs, and with probabilities on either side."""
    total = int(routed.sum())
    given = jnp.asarray(routed)
    out, moved, row_map, offsets, _ = module.token_dispatch(x, given, total, probs, align)
    made = jnp.sin(out * weight[: len(out)]) * moved[:, None]
    return module.token_combine(made, row_map, probs, offsets)


def dense(x, probs, weight, routed, align):
    out = jnp.zeros_like(x)
    for row, token, expert in places(routed, align or 1)[0]:
        made = jnp.sin(x[token] * weight[row]) * probs[token, expert] ** 2
        out = out.at[token].add(made)
    return out


@pytest.mark.sample(1)
@pytest.mark.parametrize("align", [None, 4])
def test_gradients(align):
    operands, routed = (
        (normal(TOKENS, HIDDEN), normal(TOKENS, EXPERTS), normal(60, HIDDEN)),
        routing(),
    )
    with jax.enable_x64(True):
        given = [jnp.asarray(x, jnp.float64) for x in operands]
        loss = lambda *given: (dense(*given, routed, align) ** 2).sum()  # noqa: E731
        wanted = jax.jit(jax.grad(loss, range(3)))(*given)
    for module in (te, reference):
        loss = lambda *given, m=module: (layer(*given, routed, align, m) ** 2).sum()  # noqa: E731
        for one, other in zip(jax.jit(jax.grad(loss, range(3)))(*operands), wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_gradients_have_gradients():
    operands, routed = (
        (normal(TOKENS, HIDDEN), normal(TOKENS, EXPERTS), normal(60, HIDDEN)),
        routing(),
    )

    def slope(module):
        loss = lambda *given: (layer(*given, routed, 4, module) ** 2).sum()  # noqa: E731
        both = jax.grad(loss, (0, 1))
        return jax.grad(lambda *given: sum((g**2).sum() for g in both(*given)), (0, 1, 2))

    for one, other in zip(slope(te)(*operands), slope(reference)(*operands), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)


def test_vmap():
    x = normal(2, TOKENS, HIDDEN)
    routed = jnp.asarray(np.stack([routing(), routing(seed=1)]))
    run = lambda x, routed: te.token_dispatch(x, routed, 40, align_size=2)  # noqa: E731
    found = jax.vmap(run)(x, routed)
    for i in range(2):
        wanted = run(x[i], routed[i])
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(one[i], other)


def test_each_device_has_its_columns(mesh):
    routed, operands = routing(), (normal(TOKENS, 8), normal(TOKENS, EXPERTS), normal(60, 8))
    slopes = jax.jit(
        jax.value_and_grad(lambda *given: (layer(*given, routed, 4, te) ** 2).sum(), (0, 1, 2))
    )
    placed = (put(mesh, operands[0], None, "model"), put(mesh, operands[1]),
              put(mesh, operands[2], None, "model"))  # fmt: skip
    compiled = slopes.lower(*placed).compile()
    calls = [line for line in compiled.as_text().splitlines() if "permute" in line]
    columns = 8 // mesh.shape["model"]
    assert any(f"f32[{TOKENS},{columns}]" in line for line in calls)
    for one, other in zip(
        jax.tree.leaves(compiled(*placed)), jax.tree.leaves(slopes(*operands)), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"inp": jnp.zeros((3, 4), jnp.int8)}, TypeError, "inp must.*got int8"),
        (
            {"inp": jnp.zeros(4)},
            ValueError,
            r"inp must have shape \[tokens, hidden\], got \(4,\)",
        ),
        ({"inp": jnp.zeros((2, 4))}, ValueError, "routing_map must have 2 tokens, as inp, got 3"),
        ({"routing_map": jnp.zeros((3, 5))}, TypeError, "routing_map must be bool.*got float32"),
        ({"num_out_tokens": 0}, ValueError, "num_out_tokens must be positive.*got 0"),
        ({"num_out_tokens": 2.5}, TypeError, "num_out_tokens must.*got float"),
        ({"align_size": 0}, ValueError, "align_size must be positive.*got 0"),
        ({"probs": jnp.zeros((3, 4))}, ValueError, "probs must have shape"),
        ({"probs": jnp.zeros((3, 5), jnp.int32)}, TypeError, "probs must.*got int32"),
        ({"num_out_tokens": 2**31}, ValueError, "num_out_tokens must be for at most 2147483647"),
        (
            {"num_out_tokens": 2**31 - 5, "align_size": 8},
            ValueError,
            r"num_out_tokens must be .*, got 2147483672 \(with their padding\)",
        ),
    ],
)
def test_what_dispatch_refuses(change, error, message):
    given = {"inp": jnp.zeros((3, 4)), "routing_map": jnp.ones((3, 5), bool), "num_out_tokens": 4}
    with pytest.raises(error, match=f"token_dispatch: {message}"):
        te.token_dispatch(**given | change)


def test_rows_that_int32_cannot_count():
    """One fewer is a program; its map alone would take 17 GB."""
    inp = jax.ShapeDtypeStruct((2**27, 1), jnp.bfloat16)
    dispatch = lambda x, routed: te.token_dispatch(x, routed, 8)[2]  # noqa: E731
    for experts in (15, 16):
        routed = jax.ShapeDtypeStruct((2**27, experts), jnp.bool_)
        if experts < 16:
            assert jax.eval_shape(dispatch, inp, routed).shape == (2**27, 31)
            continue
        with pytest.raises(ValueError, match=r"got 2147483648 \(tokens times experts\). Dispatch"):
            jax.eval_shape(dispatch, inp, routed)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"inp": jnp.zeros(4)}, ValueError, r"inp must have shape \[rows, hidden\], got \(4,\)"),
        ({"inp": jnp.zeros((4, 2), jnp.int32)}, TypeError, "inp must.*got int32"),
        (
            {"row_id_map": jnp.zeros((3, 10), jnp.int32)},
            ValueError,
            r"\[tokens, 2 \* experts \+ 1\]",
        ),
        ({"row_id_map": jnp.zeros((3, 11))}, TypeError, "row_id_map must.*got float32"),
        ({"merging_probs": jnp.zeros((3, 4))}, ValueError, "merging_probs must have shape"),
        ({"pad_offsets": jnp.zeros(4, jnp.int32)}, ValueError, "pad_offsets must have shape"),
    ],
)
def test_what_combine_refuses(change, error, message):
    given = {"inp": jnp.zeros((4, 2)), "row_id_map": jnp.zeros((3, 11), jnp.int32)}
    with pytest.raises(error, match=f"token_combine: .*{message}"):
        te.token_combine(**given | change)
