"""Adam with moments of 8 bits, beside optax's."""

import functools

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from sklearn.datasets import load_digits

import quant_optim as qo


def layers(seed, *sizes):
    keys = jax.random.split(jax.random.key(seed), len(sizes) - 1)
    return [
        {"w": jax.random.normal(key, (n, m)) * (2 / n) ** 0.5, "b": jnp.zeros(m)}
        for key, n, m in zip(keys, sizes, sizes[1:], strict=False)
    ]


def loss(params, x, y):
    *hidden, last = params
    for layer in hidden:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    logits = x @ last["w"] + last["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def losses_of(optimizer, seeds=3, steps=300):
    """Return the mean loss of the last steps of training, for each seed."""
    x, y = load_digits(return_X_y=True)
    x, y = jnp.asarray(x / 16, jnp.float32), jnp.asarray(y)

    def step(seed, carry, number):
        params, state = carry
        key = jax.random.fold_in(jax.random.key(seed + 100), number)
        rows = jax.random.randint(key, (64,), 0, len(x))
        found, gradients = jax.value_and_grad(loss)(params, x[rows], y[rows])
        updates, state = optimizer.update(gradients, state, params)
        return (optax.apply_updates(params, updates), state), found

    def train(seed):
        params = layers(seed, 64, 96, 96, 10)
        carry = params, optimizer.init(params)
        return jax.lax.scan(functools.partial(step, seed), carry, jnp.arange(steps))[1]

    return np.asarray(jax.jit(jax.vmap(train))(jnp.arange(seeds)))[:, -50:].mean(1)


@pytest.mark.parametrize(
    ("ours", "optaxs"),
    [
        (qo.adam_8bit(2e-3, least_size=64), optax.adam(2e-3)),
        pytest.param(
            qo.adamw_8bit(2e-3, weight_decay=0.05, least_size=64),
            optax.adamw(2e-3, weight_decay=0.05),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            qo.adam_8bit(2e-3, block_size=64, least_size=64, nesterov=True),
            optax.adam(2e-3, nesterov=True),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["adam", "adamw", "nesterov"],
)
def test_loss_is_that_of_floats(ours, optaxs):
    found, wanted = losses_of(ours), losses_of(optaxs)
    # No further off than another seed is.
    assert abs(found.mean() - wanted.mean()) < max(wanted.std(), 0.05 * wanted.mean())


@pytest.mark.parametrize("nesterov", [False, True])
def test_small_parameters_have_floats(nesterov):
    params = {"w": jnp.ones((3, 5)), "b": jnp.ones(5)}
    ours = qo.scale_by_adam_8bit(0.8, 0.95, 1e-6, 1e-7, nesterov=nesterov)
    optaxs = optax.scale_by_adam(0.8, 0.95, 1e-6, 1e-7, nesterov=nesterov)
    states = [one.init(params) for one in (ours, optaxs)]
    for step in range(4):
        keys = dict(zip(params, jax.random.split(jax.random.key(step)), strict=True))
        gradients = {name: jax.random.normal(keys[name], x.shape) for name, x in params.items()}
        found, states[0] = ours.update(gradients, states[0])
        wanted, states[1] = optaxs.update(gradients, states[1])
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-6), found, wanted)


def test_updates_have_the_dtype_of_gradients():
    params = {"w": jnp.ones((64, 128), jnp.bfloat16), "b": jnp.ones(5, jnp.bfloat16)}
    optimizer = qo.scale_by_adam_8bit()
    updates, state = optimizer.update(params, optimizer.init(params))
    assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype(jnp.bfloat16)}
    assert state.mu["b"].dtype == jnp.float32


def test_second_moment_decays_in_8_bits():
    # A step takes a thousandth off, less than the eighth from point to point.
    params = jnp.zeros((8, 1024))
    optimizer = qo.scale_by_adam_8bit(0.9, 0.999)
    state = optimizer.init(params)
    update = jax.jit(lambda gradient, state: optimizer.update(gradient, state)[1])
    state = update(jnp.ones(params.shape), state)
    before = qo.restored(state.nu, 256)
    for _ in range(300):
        state = update(jnp.zeros(params.shape), state)
    left = float(qo.restored(state.nu, 256).mean() / before.mean())
    assert abs(left / 0.999**300 - 1) < 0.02


def test_state_takes_two_bytes():
    params = {"w": jnp.zeros((64, 1024), jnp.bfloat16), "norm": jnp.zeros(1024)}
    state = jax.eval_shape(qo.adamw_8bit(1e-3).init, params)
    (scaled, *_) = state
    assert scaled.mu["w"].values.dtype == jnp.int8
    assert scaled.nu["w"].values.dtype == jnp.uint8
    assert scaled.mu["w"].values.shape == (64, 1024)
    assert scaled.mu["w"].scales.shape == (64, 4)
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((scaled.mu, scaled.nu)))
    assert held == 64 * 1024 * 2 + 64 * 4 * (4 + 2) + 1024 * 8


def test_the_same_again_and_sharded():
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = jax.NamedSharding(mesh, jax.P("x", "y"))
    params = jax.random.normal(jax.random.key(0), (16, 1024))
    optimizer = qo.adam_8bit(1e-2)

    def run(params):
        def step(carry, _):
            params, state = carry
            gradients = jnp.sin(params * 3) + 0.01
            updates, state = optimizer.update(gradients, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, optimizer.init(params)), None, 5)[0]

    found, state = jax.jit(run)(params)
    there, placed = jax.jit(run)(jax.device_put(params, sharding))
    np.testing.assert_allclose(found, there, rtol=1e-5, atol=1e-6)
    assert placed[0].mu.values.sharding.is_equivalent_to(sharding, 2)
    np.testing.assert_array_equal(found, jax.jit(run)(params)[0])
    assert int(np.sum(state[0].mu.values != placed[0].mu.values)) < 20


def test_with_flax():
    model = nnx.Linear(64, 128, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, qo.adamw_8bit(1e-2), wrt=nnx.Param)
    gradients = nnx.grad(lambda model: (model(jnp.ones((2, 64))) ** 2).sum())(model)
    before = np.asarray(model.kernel[...])
    optimizer.update(model, gradients)
    # Adam's first step is the learning rate, for each parameter with a gradient, and decay.
    moved = before * (1 - 1e-2 * 1e-4) - np.asarray(model.kernel[...])
    np.testing.assert_allclose(np.abs(moved), 1e-2, rtol=1e-3)

    transform = qo.scale_by_adam_8bit()
    state = transform.init({"w": jnp.ones((64, 128))})
    _, state = transform.update({"w": jax.random.normal(jax.random.key(0), (64, 128))}, state)
    written = flax.serialization.to_bytes(state)
    read = flax.serialization.from_bytes(jax.tree.map(jnp.zeros_like, state), written)
    jax.tree.map(np.testing.assert_array_equal, read, state)


def test_in_other_transformations():
    params = {"w": jnp.ones((64, 128)), "frozen": jnp.ones((64, 128)), "none": None}
    optimizer = optax.partition(
        {"train": qo.adam_8bit(1e-2), "keep": optax.set_to_zero()},
        {"w": "train", "frozen": "keep", "none": "keep"},
    )
    state = optimizer.init(params)
    updates, _ = optimizer.update(jax.tree.map(jnp.ones_like, params), state, params)
    np.testing.assert_allclose(updates["w"], -1e-2, rtol=1e-5)
    assert not np.any(updates["frozen"])
    sizes = ("block_size", "least_size")
    injected = optax.inject_hyperparams(qo.adamw_8bit, static_args=sizes)(
        learning_rate=optax.linear_schedule(1, 0, 4), weight_decay=0.0
    )
    state = injected.init(params)
    for _ in range(3):
        updates, state = injected.update(jax.tree.map(jnp.ones_like, params), state, params)
    # Second moments are rounded by up to an eighth, and so their roots by a sixteenth.
    np.testing.assert_allclose(updates["w"], -0.5, rtol=7e-2)


def test_gradients_that_are_not_finite_are_seen():
    optimizer = qo.scale_by_adam_8bit()
    state = optimizer.init(jnp.ones((4, 1024)))
    for bad in (np.nan, np.inf):
        gradients = jnp.ones((4, 1024)).at[1, 2].set(bad)
        updates, after = optimizer.update(gradients, state)
        assert not np.isfinite(updates[1, 2])
        assert np.isfinite(updates[0]).all()
        updates, _ = optimizer.update(jnp.ones((4, 1024)), after)
        assert not np.isfinite(updates[1, 2])
        assert np.isfinite(updates[0]).all()


@pytest.mark.parametrize(
    ("do", "message"),
    [
        (lambda: qo.adam_8bit(1e-3, b1=1.0), "b1 must be at least 0 and below 1, got 1.0"),
        (lambda: qo.adamw_8bit(1e-3, block_size=0), "block_size must be an integer of 1 or more"),
        (
            lambda: qo.scale_by_adam_8bit(least_size=-1),
            "least_size must be an integer of 0 or more",
        ),
        (
            lambda: qo.adam_8bit(1e-3).init({"i": jnp.ones(3, int)}),
            "must be real floats, got int32",
        ),
        (
            lambda: qo.adam_8bit(1e-3).update(jnp.ones(3), qo.adam_8bit(1e-3).init(jnp.ones(4))),
            r"number 0 must be \(4,\), got \(3,\)",
        ),
    ],
)
def test_errors(do, message):
    with pytest.raises(ValueError, match=message):
        do()
