"""Adam with moments of 8 bits."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .moments import Moment, first_moment, noise_of, restored, second_moment


class ScaleByAdam8bitState(NamedTuple):
    """The state of ``scale_by_adam_8bit``.

    Attributes:
        count: int32[], the number of steps.
        mu: the first moments, a ``Moment`` for each parameter; float32 for one that is small.
        nu: the second moments.
    """

    count: jax.Array
    mu: Any
    nu: Any


def scale_by_adam_8bit(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    *,
    block_size: int = 256,
    least_size: int = 4096,
    nesterov: bool = False,
) -> optax.GradientTransformation:
    """Scale gradients by Adam's moments, which are kept in 8 bits.

    As ``optax.scale_by_adam`` (Kingma and Ba, arXiv:1412.6980): each step computes in float32, with
    the moments of the step before from 8 bits. A parameter of ``n`` numbers takes ``2 n`` bytes and
    6 for each block, where float32 takes ``8 n``. Steps are reproducible, without a random key.

    Args:
        b1: how much of the first moment a step keeps, in [0, 1).
        b2: the same of the second one.
        eps: added to the root of the second moment.
        eps_root: added to the second moment under the root, for derivatives of updates.
        block_size: how many numbers share a scale, along the last axis of a parameter, or its
            longest one if that is shorter than 64.
        least_size: parameters of fewer numbers have moments of float32: norms and biases, which
            are few and matter much.
        nesterov: whether to use Nesterov momentum (Dozat, 2016).

    Returns:
        The transformation. Its state is a ``ScaleByAdam8bitState``.

    Raises:
        ValueError: an argument is out of its range; ``update`` gets gradients that are not real
            floats, or of other shapes than the parameters that ``init`` got.
    """
    for name, value in (("b1", b1), ("b2", b2)):
        if isinstance(value, float | int) and not 0 <= value < 1:
            raise ValueError(f"{name} must be at least 0 and below 1, got {value}.")
    for name, size, least in (("block_size", block_size, 1), ("least_size", least_size, 0)):
        if not isinstance(size, int) or size < least:
            raise ValueError(
                f"{name} must be an integer of {least} or more, got {size!r}. In "
                "optax.inject_hyperparams name it in static_args."
            )

    def init(params: Any) -> ScaleByAdam8bitState:
        def zeros(which: Any) -> Any:
            def of(param: Any) -> Any:
                _check(param, "parameters")
                zero = jnp.zeros_like(param, jnp.float32)
                return which(zero, zero, block_size) if param.size >= least_size else zero

            return jax.tree.map(of, params)

        count = jnp.zeros([], jnp.int32)
        return ScaleByAdam8bitState(count, zeros(first_moment), zeros(second_moment))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        count = jnp.asarray(optax.safe_increment(state.count))
        gradients, structure = jax.tree.flatten(updates)
        moments = [structure.flatten_up_to(tree) for tree in (state.mu, state.nu)]
        steps = [
            one_step(i, gradient, mu, nu, count)
            for i, (gradient, mu, nu) in enumerate(zip(gradients, *moments, strict=True))
        ]
        found, mu, nu = (structure.unflatten([step[k] for step in steps]) for k in range(3))
        return found, ScaleByAdam8bitState(count, mu, nu)

    def one_step(leaf: int, gradient: Any, mu: Any, nu: Any, count: jax.Array) -> Any:
        _check(gradient, "gradients")
        held = mu.values if isinstance(mu, Moment) else mu
        if held.shape != gradient.shape:
            raise ValueError(
                f"Gradients must have the shapes of the parameters that init got: number {leaf} "
                f"must be {held.shape}, got {gradient.shape}."
            )
        g = gradient.astype(jnp.float32)
        m, v = (restored(x, block_size) if isinstance(x, Moment) else x for x in (mu, nu))
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        first, second = 1 - b1**count, 1 - b2**count
        top = b1 * m / (1 - b1 ** (count + 1)) + (1 - b1) * g / first if nesterov else m / first
        step = top / (jnp.sqrt(v / second + eps_root) + eps)
        if isinstance(mu, Moment):
            one, other = noise_of(g.shape, count, leaf)
            m, v = first_moment(m, one, block_size), second_moment(v, other, block_size)
        return step.astype(gradient.dtype), m, v

    return optax.GradientTransformation(init, update)


def adam_8bit(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    *,
    block_size: int = 256,
    least_size: int = 4096,
    nesterov: bool = False,
) -> optax.GradientTransformation:
    """Adam with moments of 8 bits, as ``optax.adam``.

    Args:
        learning_rate: a number, or a schedule of steps.
        b1: see ``scale_by_adam_8bit``, as for the others.
        b2: how much of the second moment a step keeps.
        eps: added to its root.
        eps_root: added under its root.
        block_size: how many numbers share a scale.
        least_size: parameters of fewer numbers have moments of float32.
        nesterov: whether to use Nesterov momentum.
    """
    sizes = {"block_size": block_size, "least_size": least_size, "nesterov": nesterov}
    scale = scale_by_adam_8bit(b1, b2, eps, eps_root, **sizes)
    return optax.chain(scale, optax.scale_by_learning_rate(learning_rate))


def adamw_8bit(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    weight_decay: float = 1e-4,
    mask: Any = None,
    *,
    block_size: int = 256,
    least_size: int = 4096,
    nesterov: bool = False,
) -> optax.GradientTransformation:
    """Adam with decoupled weight decay and moments of 8 bits, as ``optax.adamw``.

    Loshchilov and Hutter, arXiv:1711.05101.

    Args:
        learning_rate: a number, or a schedule of steps.
        b1: see ``scale_by_adam_8bit``, as for the others.
        b2: how much of the second moment a step keeps.
        eps: added to its root.
        eps_root: added under its root.
        weight_decay: how much of a parameter is subtracted, times the learning rate.
        mask: which parameters decay: see ``optax.add_decayed_weights``.
        block_size: how many numbers share a scale.
        least_size: parameters of fewer numbers have moments of float32.
        nesterov: whether to use Nesterov momentum.
    """
    sizes = {"block_size": block_size, "least_size": least_size, "nesterov": nesterov}
    return optax.chain(
        scale_by_adam_8bit(b1, b2, eps, eps_root, **sizes),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def _check(array: Any, what: str) -> None:
    dtype = jnp.result_type(array)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"Adam's {what} must be real floats, got {dtype}. Leave others out with optax.masked "
            "or optax.partition."
        )
