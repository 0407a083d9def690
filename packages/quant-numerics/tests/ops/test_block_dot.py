"""Contractions of one block format on platforms that multiply blocks as they are."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quant_numerics as qn
from jaxtap_testkit.meshes import grid, put
from jaxtap_testkit.programs import as_program
from jaxtap_testkit.qarray_samples import normal, value
from quant_numerics.ops import dot as ops_dot

CALL = "__op$block_scaled_dot"
# Shapes and dimension numbers: matmuls, batches, several contracted axes, a vector.
CASES = {
    "matmul": ((5, 64), (64, 7), (((1,), (0,)), ((), ()))),
    "rhs transposed": ((5, 64), (7, 64), (((1,), (1,)), ((), ()))),
    "first axes": ((64, 5), (64, 7), (((0,), (0,)), ((), ()))),
    "batches": ((2, 3, 5, 32), (3, 32, 7, 2), (((3,), (1,)), ((0, 1), (3, 0)))),
    "two contracted axes": ((5, 4, 32), (4, 32, 7), (((1, 2), (0, 1)), ((), ()))),
    "a block of two axes": ((5, 8, 16), (8, 16, 7), (((1, 2), (0, 1)), ((), ()))),
    "free axes": ((2, 5, 96), (96, 3, 4), (((2,), (0,)), ((), ()))),
    "a vector": ((32,), (32, 7), (((0,), (0,)), ((), ()))),
}
FORMATS = ["mxfp8", "nvfp4"]
quantize = as_program(qn.quantize)


@as_program
def quantized(arrays, axes, qtypes):
    """Quantize for products, all in one program."""
    given = zip(arrays, axes, qtypes, strict=True)
    return [qn.quantize_for_dot(x, along, qtype) for x, along, qtype in given]


def operands(name, qtype):
    lhs, rhs, dims = CASES[name]
    return *quantized([normal(*lhs), normal(*rhs, seed=1)], dims[0], [qtype] * 2), dims


def text(fn, *args, platforms=("cuda",)):
    return jax.jit(fn).trace(*args).lower(lowering_platforms=platforms).as_text()


def calls(found):
    """Return the types of the operands and results of calls of XLA's matmul of blocks."""
    return [re.findall(r"tensor<(\S+?)>", line.rpartition(" : ")[2])
            for line in found.splitlines() if CALL in line]  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize("qtype", FORMATS)
def test_one_call_on_cuda_and_the_same_values(qtype):
    dims = [dims for *_, dims in CASES.values()]
    shapes = [shape for *pair, _ in CASES.values() for shape in pair]
    arrays = [normal(*shape, seed=i % 2) for i, shape in enumerate(shapes)]
    axes = [along for contracting, _ in dims for along in contracting]
    sides = quantized(arrays, axes, [qtype] * len(arrays))
    pairs = list(zip(sides[::2], sides[1::2], strict=True))

    def dots(pairs):
        return [qn.dot_general(*pair, n) for pair, n in zip(pairs, dims, strict=True)]

    def native(pairs):
        """What the call computes, in JAX."""
        return [ops_dot._native(*pair, n) for pair, n in zip(pairs, dims, strict=True)]

    found = text(dots, pairs)
    assert "stablehlo.dot_general" not in found
    kind = {"mxfp8": "f8E4M3FN", "nvfp4": "f4E2M1FN"}[qtype]
    scale = {"mxfp8": "f8E8M0FNU", "nvfp4": "f8E4M3FN"}[qtype]
    block = qn.get_qtype(qtype).block
    wanted = set()
    for lhs, rhs, ((lc, _), (lb, _)) in CASES.values():
        b, k = (math.prod(lhs[a] for a in axes) for axes in (lb, lc))
        m, n = math.prod(lhs) // b // k, math.prod(rhs) // b // k
        shapes = [(b, m, k, kind), (b, n, k, kind), (b, m, k // block, scale),
                  (b, n, k // block, scale), (b, m, n, "f32")]  # fmt: skip
        wanted.add(tuple("x".join(map(str, one)) for one in shapes))
    # Those of equal shapes share a function.
    assert set(map(tuple, calls(found))) == wanted
    results = jax.jit(lambda pairs: (dots(pairs), native(pairs)))(pairs)
    for name, pair, n, *outs in zip(CASES, pairs, dims, *results, strict=True):
        exact, size = (_exact(*(f(value(q)) for q in pair), n) for f in (np.asarray, np.abs))
        for out in outs:
            assert out.shape == exact.shape
            assert np.all(np.abs(np.asarray(out) - exact) <= 2e-6 * size), name


def _exact(a, b, dims):
    """Contract in float64 by einsum."""
    (lc, rc), (lb, rb) = dims
    left = [chr(97 + i) for i in range(a.ndim)]
    right = [chr(110 + i) for i in range(b.ndim)]
    for i, j in zip((*lc, *lb), (*rc, *rb), strict=True):
        right[j] = left[i]
    batch = [left[i] for i in lb]
    kept = [c for i, c in enumerate(left) if i not in (*lc, *lb)]
    kept += [c for i, c in enumerate(right) if i not in (*rc, *rb)]
    spec = f"{''.join(left)},{''.join(right)}->{''.join(batch + kept)}"
    return np.einsum(spec, np.asarray(a, np.float64), np.asarray(b, np.float64))


def test_other_platforms_run_what_they_ran(monkeypatch):
    """XLA takes the only branch out of a case: its program is the same."""
    lhs, rhs, dims = operands("matmul", "mxfp8")

    def programs():
        def dot(lhs, rhs):  # one that JAX has not traced
            return qn.dot_general(lhs, rhs, dims)

        lowered = [text(dot, lhs, rhs, platforms=(one,)) for one in ("cpu", "tpu")]
        kinds = [sorted(re.findall(r"stablehlo\.(?!case|return)\w+", one)) for one in lowered]
        run = jax.jit(dot).lower(lhs, rhs).compile()
        compiled = re.sub(r", metadata=\{[^}]*\}|, stack_frame_id=\d+", "", run.as_text())
        compiled = re.sub(r"\n\n(?:FileNames|FunctionNames).*", "", compiled, flags=re.DOTALL)
        return kinds, compiled, run(lhs, rhs)

    kinds, compiled, found = programs()
    monkeypatch.setattr("quant_numerics.ops.dot.is_block_dot", lambda *_: False)
    before, compiled_before, wanted = programs()
    assert _without_constants(kinds) == _without_constants(before)
    assert compiled == compiled_before
    np.testing.assert_array_equal(found, wanted)


def _without_constants(kinds):
    return [[kind for kind in one if kind != "stablehlo.constant"] for one in kinds]


def test_rocm_has_the_composite():
    lhs, rhs, dims = operands("matmul", "nvfp4")
    found = text(lambda a, b: qn.dot_general(a, b, dims), lhs, rhs, platforms=("rocm",))
    assert found.count('composite "xla.scaled_dot"') == 1


def test_programs_that_are_exported_have_no_call():
    """JAX does not promise that it will be there; nor can a program of two platforms hold it."""
    lhs, rhs, dims = operands("matmul", "mxfp8")
    x, w = value(lhs), value(rhs)

    def fn(x, w):
        pair = qn.quantize_for_dot(x, (1,), "mxfp8"), qn.quantize_for_dot(w, (0,), "mxfp8")
        return qn.dot_general(*pair, dims)

    args = x.astype(np.float32), w.astype(np.float32)
    for platforms in (("cuda",), ("cpu", "cuda")):
        exported = jax.export.export(jax.jit(fn), platforms=platforms)(*args)
        assert CALL not in exported.mlir_module()
        restored = jax.export.deserialize(exported.serialize())
        if "cpu" in platforms:
            found = restored.call(*args)
            assert np.abs(np.asarray(found) - x @ w).max() <= 2e-6 * (np.abs(x) @ np.abs(w)).max()


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0), (1, 2)])
def test_examples_that_are_mapped(axes):
    lhs, rhs = normal(4, 5, 64), normal(4, 64, 7, seed=1)
    given = [
        x[0] if axis is None else np.moveaxis(x, 0, axis)
        for x, axis in zip((lhs, rhs), axes, strict=True)
    ]

    def dot(x, w, run=None):
        pair = qn.quantize_for_dot(x, (1,), "nvfp4"), qn.quantize_for_dot(w, (0,), "nvfp4")
        dims = (((1,), (0,)), ((), ()))
        return qn.dot_general(*pair, dims) if run is None else run(*pair, dims)

    mapped = jax.vmap(dot, axes)
    ((left, right, *_),) = calls(text(mapped, *given))
    # One that all examples share is not copied for each.
    shapes = {(0, None): ("1x20x64", "1x7x64"), (None, 0): ("1x5x64", "1x28x64")}
    assert (left.rpartition("x")[0], right.rpartition("x")[0]) == shapes.get(
        axes, ("4x5x64", "4x7x64")
    )
    native = jax.jit(jax.vmap(functools.partial(dot, run=ops_dot._native), axes))(*given)
    np.testing.assert_allclose(native, jax.jit(mapped)(*given), rtol=1e-5, atol=1e-5)


def test_derivatives_are_those_in_jax(monkeypatch):
    """Of an operand that is quantized inside, and of a global scale."""
    x, (_, rhs, dims) = normal(5, 64), operands("matmul", "nvfp4")

    def loss(x, rhs_scale):
        lhs = qn.quantize_for_dot(x, (1,), "nvfp4")
        scaled = qn.qarray(rhs.qvalue, rhs.scale, "nvfp4", rhs.dtype, global_scale=rhs_scale)
        return jnp.sum(qn.dot_general(lhs, scaled, dims) ** 2)

    def slope():
        return jax.jit(lambda *args: jax.grad(loss, (0, 1))(*args))(x, rhs.global_scale)

    found = slope()
    monkeypatch.setattr("quant_numerics.ops.dot.is_block_dot", lambda *_: False)
    wanted = slope()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, wanted)
    assert np.abs(found[1]).max() > 0


def test_what_has_no_such_call():
    dims = (((1,), (0,)), ((), ()))
    x, w = normal(5, 64), normal(64, 7, seed=1)

    qtypes = ["mxfp8", "mxfp4", "int8", "float8_e4m3fn"]
    sides = quantized([*[x, w] * 4, x[:, :48], w[:48]], [(1,), (0,)] * 5,
                      [one for one in [*qtypes, "mxfp8"] for _ in range(2)])  # fmt: skip
    mxfp8, mxfp4, int8, float8, short = zip(sides[::2], sides[1::2], strict=True)
    others = (mxfp8[0], mxfp4[1]), (mxfp8[0], w)
    for pair in (*others, mxfp4, int8, float8, short):
        assert not ops_dot.is_block_dot(*pair, dims)
        assert not calls(text(lambda a, b: qn.dot_general(a, b, dims), *pair))
    # Scales along other axes than those that are contracted.
    other = (
        quantize(x, "mxfp8", tile_axes={1: 32}),
        quantize(w.T.reshape(7, 64), "mxfp8", tile_axes={1: 32}, channel_axes=(0,)),
    )
    across = (((1,), (1,)), ((), ()))
    assert ops_dot.is_block_dot(*other, across)  # one scale for all rows is repeated
    found = jax.jit(functools.partial(ops_dot._native, dimension_numbers=across))(*other)
    exact = value(other[0]) @ value(other[1]).T
    assert np.abs(np.asarray(found) - exact).max() <= 1e-5 * np.abs(exact).max()


@pytest.mark.parametrize("at", [(0, 2), (1,)])
def test_rows_have_global_scales_of_their_own(at):
    """As rows of a table have that were looked up. Along the contraction there is one."""
    rng = np.random.default_rng(3)
    x, w = (rng.standard_normal(shape, np.float32) for shape in ((2, 32, 3), (5, 32)))
    lhs = quantize(x, "nvfp4", tile_axes={1: 16}, channel_axes=(0, 2))
    rhs = quantize(w, "nvfp4", tile_axes={1: 16}, channel_axes=(0,))
    shape = [n if a in at else 1 for a, n in enumerate(lhs.scale.shape)]
    whole = rng.uniform(0.5, 2, shape).astype(np.float32)
    lhs = dataclasses.replace(lhs, global_scale=jnp.asarray(whole))
    dims = (((1,), (1,)), ((), ()))
    exact = np.einsum("ack,rc->akr", value(lhs), value(rhs))
    assert ops_dot.is_block_dot(lhs, rhs, dims) == (1 not in at)
    run = ops_dot._native if 1 not in at else qn.dot_general
    found = jax.jit(functools.partial(run, dimension_numbers=dims))(lhs, rhs)
    assert np.abs(np.asarray(found) - exact).max() <= 1e-5 * np.abs(exact).max()


def test_on_a_mesh_each_device_multiplies_its_part():
    lhs, rhs, dims = operands("matmul", "mxfp8")
    x, w = (v.astype(np.float32) for v in (value(lhs)[:4], value(rhs)))

    def fn(x, w):
        pair = qn.quantize_for_dot(x, (1,), "mxfp8"), qn.quantize_for_dot(w, (0,), "mxfp8")
        return qn.dot_general(*pair, dims)

    mesh = grid((4, 2), ("a", "b"))
    found = text(fn, put(mesh, x, "a"), put(mesh, w))
    assert "@CustomSPMDPartitioning" in found
    # The program of one device is not partitioned: it runs in JAX.
    split = jax.shard_map(fn, mesh=mesh, in_specs=(jax.P("a"), jax.P()), out_specs=jax.P("a"))
    assert not calls(text(split, put(mesh, x, "a"), put(mesh, w)))
    np.testing.assert_allclose(jax.jit(split)(x, w), jax.jit(fn)(x, w), rtol=1e-5, atol=1e-5)
