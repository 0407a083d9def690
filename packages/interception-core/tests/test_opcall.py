"""What handlers are told: ids, paths, operands, fingerprints."""

import jax
import jax.numpy as jnp
import pytest

from interception_core import Interceptor, PatchEngine
from jaxtap_testkit.processes import run_python

ENGINE = PatchEngine()
NO_JIT = PatchEngine(disable_jit=True)
X, W = jnp.ones((2, 3)), jnp.ones((3, 3))


def ids_of(engine, body, *targets, path_key=None):
    """Returns a function that runs ``body`` tapped and gives the ids that it saw."""
    seen = []

    def handler(call, *args, **kwargs):
        seen.append(call.op_id)
        return NotImplemented

    interceptor = Interceptor(dict.fromkeys(targets, handler), path_key=path_key)
    wrapped = engine.wrap(body, interceptor)

    def run(*args, transform=lambda fn: fn):
        seen.clear()
        transform(wrapped)(*args)
        return list(seen)

    return run


def model(x, w):
    with jax.named_scope("encoder"):
        for i in range(2):
            with jax.named_scope(f"layer_{i}"):
                x = jnp.dot(x, w)
                x = jnp.dot(x, w)
    return jnp.dot(x, w).sum()


IDS = [
    "encoder/layer_0/dot:0",
    "encoder/layer_0/dot:1",
    "encoder/layer_1/dot:0",
    "encoder/layer_1/dot:1",
    "dot:0",
]


@pytest.mark.slow
@pytest.mark.parametrize("engine", [ENGINE, NO_JIT], ids=["jit", "no jit"])
def test_ids_are_paths_and_numbers_under_every_transformation(engine):
    run = ids_of(engine, model, "jax.numpy.dot")
    assert run(X, W) == IDS
    assert run(X, W) == IDS  # whatever is cached by now
    assert run(X, W, transform=jax.jit) == IDS
    assert run(X, W, transform=jax.grad) == IDS
    assert run(X, W, transform=lambda fn: jax.jit(jax.grad(fn))) == IDS
    assert run(X[None], W, transform=lambda fn: jax.vmap(fn, (0, None))) == IDS
    assert run(X, W, transform=jax.checkpoint) == IDS


def test_ids_around_a_jitted_block_do_not_depend_on_caches():
    @jax.jit
    def block(x, w):
        return jnp.dot(x, w)

    def body(x, w):
        x = block(x, w)
        x = jnp.dot(x, w)
        return jnp.dot(block(x, w), w)

    run = ids_of(ENGINE, body, "jax.numpy.dot")
    assert run(X, W) == ["jit(block)/dot:0", "dot:0", "dot:1"]
    assert run(X, W) == ["dot:0", "dot:1"]
    assert run(X, W, transform=jax.jit) == ["dot:0", "dot:1"]


def test_a_jitted_block_is_traced_for_every_path_unless_told_otherwise():
    @jax.jit
    def block(x, w):
        with jax.named_scope("inside"):
            return jnp.dot(x, w)

    def body(x, w):
        for i in range(3):
            with jax.named_scope(f"layer_{i}"):
                x = block(x, w)
        return x

    every = ids_of(ENGINE, body, "jax.numpy.dot")
    assert every(X, W) == [f"layer_{i}/inside/jit(block)/dot:0" for i in range(3)]
    once = ids_of(ENGINE, body, "jax.numpy.dot", path_key=lambda path: None)
    assert once(X, W) == ["layer_0/inside/jit(block)/dot:0"]


def test_name_scope_decorators_count_as_well():
    layer = jax.named_scope("decorated")(lambda x, w: jnp.dot(x, w))
    assert ids_of(ENGINE, layer, "jax.numpy.dot")(X, W) == ["decorated/dot:0"]


def test_paths_start_at_the_wrapped_function():
    run = ids_of(ENGINE, model, "jax.numpy.dot")
    with jax.named_scope("outside"):
        assert run(X, W) == IDS


@pytest.mark.slow
def test_flax_modules_give_their_paths():
    from flax import linen

    class Block(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(3, name="down")(linen.Dense(4, name="up")(x))

    block = Block()
    params = block.init(jax.random.key(0), X)
    run = ids_of(ENGINE, block.apply, "jax.lax.dot_general")
    assert run(params, X) == ["Block/up/dot_general:0", "Block/down/dot_general:0"]


def operands_of(body, *args, engine=ENGINE, transform=lambda fn: fn, **kwargs):
    seen = []

    def handler(call, *args, **kwargs):
        seen.append(call.operands)
        return NotImplemented

    transform(engine.wrap(body, Interceptor({"jax.numpy.dot": handler})))(*args, **kwargs)
    return seen


@pytest.mark.parametrize("transform", [lambda fn: fn, jax.jit], ids=["eager", "jit"])
def test_operands_know_the_input_they_are(transform):
    def body(params, x, *, scale):
        h = jnp.dot(x, params["layer"][0])
        return jnp.dot(h, params["layer"][1]) + jnp.dot(scale, h)

    first, second, third = operands_of(
        body, {"layer": [W, W + 1]}, X, scale=jnp.ones((2, 2)), transform=transform
    )
    assert [operand.provenance for operand in first] == ["args[1]", "args[0]['layer'][0]"]
    assert [operand.provenance for operand in second] == [None, "args[0]['layer'][1]"]
    assert [operand.provenance for operand in third] == ["kwargs['scale']", None]
    assert first[1].axes == (0, 1)
    assert second[0].axes is None
    assert first[1].shape == (3, 3)
    assert first[1].dtype == jnp.float32


def test_operands_are_refused_after_the_run():
    calls = []

    def handler(call, *args):
        calls.append(call)
        return NotImplemented

    ENGINE.wrap(lambda x: jnp.dot(x, W), Interceptor({"jax.numpy.dot": handler}))(X)
    with pytest.raises(RuntimeError, match="Read it in the handler"):
        _ = calls[0].operands


FINGERPRINTS = """
import jax, jax.numpy as jnp
from interception_core import Interceptor, PatchEngine

def handler(call, *args, **kwargs):
    print(call.fingerprint)
    return NotImplemented

def body(x, w):
    jnp.dot(x, w)
    jnp.dot(x, w)
    jnp.dot(x[:1], w)
    jnp.dot(x, w, precision="highest")
    jnp.dot(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16))
    jnp.einsum("ij,jk->ik", x, w, _dot_general=jax.lax.dot_general)

fn = PatchEngine().wrap(body, Interceptor({"jax.numpy.dot": handler, "jax.numpy.einsum": handler}))
fn(jnp.ones((2, 3)), jnp.ones((3, 3)))
"""


@pytest.mark.slow
def test_fingerprints_tell_structures_apart_and_are_equal_in_every_process():
    runs = [
        run_python("-c", FINGERPRINTS, PYTHONHASHSEED=seed).stdout.split() for seed in ("1", "2")
    ]
    assert runs[0] == runs[1]
    first, second, *others = runs[0]
    assert first == second
    assert len({first, *others}) == 5
