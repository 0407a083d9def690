"""GPTQ: round channel by channel, later channels compensating earlier errors."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jax import lax

import quant_numerics as qn
from provider_xla import QuantizationError

from .state import ROUND, Pass, Weight


@dataclasses.dataclass(frozen=True)
class Gptq(Pass):
    """Round channel by channel; later channels compensate each error.

    The channels to come change by ``-error * inv(H)[k, k + 1:] / inv(H)[k, k]``, for the Gram
    matrix ``H`` of the activations (Frantar et al. 2022, arXiv:2210.17323, algorithm 1), in
    blocks. Scales are those of the rule, found before rounding (static groups), so that every
    qtype, granularity and calibration method works, and quantized values stay in the plan's format.
    Elements that the rule's ``sparsity`` makes zeros stay zeros, and are compensated, too.

    Attributes:
        damping: what is added to the diagonal of ``H``, as a share of its mean.
        act_order: whether the channels with the largest activations are rounded first; False for
            the channels' order.
        block: how many channels are rounded before the rest is updated.
        sequential: how many times activations are measured, each time for the next part of the
            model, with the parameters before it as they were rounded, as GPTQ's authors do for each
            layer. 0 measures all of them in the float model, at once. Batches run as often.

    Raises:
        ValueError: a number is out of range.
    """

    damping: float = 0.01
    act_order: bool = True
    block: int = 128
    sequential: int = 0  # pyrefly: ignore[bad-override]

    stage = ROUND

    def __post_init__(self):
        if not 0 <= self.damping < float("inf"):
            raise ValueError(f"Gptq.damping must be 0 or more. Got {self.damping!r}.")
        if self.block < 1:
            raise ValueError(f"Gptq.block must be 1 or more. Got {self.block!r}.")
        if self.sequential < 0:
            raise ValueError(f"Gptq.sequential must be 0 or more. Got {self.sequential!r}.")

    def run(self, weight: Weight) -> str | None:
        """Run it: see ``Pass.run``."""
        for step, gram in enumerate(np.asarray(weight.gram, np.float64)):
            self.run_step(weight, step, gram)
        return None

    def run_step(self, weight: Weight, step: int, gram: np.ndarray) -> None:
        """Round a parameter in one step: see ``Pass.run_step``."""
        q, *grid = weight.grid()
        # A format with blocks rounds single numbers here, each with the scale of its block.
        kind = qn.get_qtype(q.qtype)
        is_own = kind.block is None or kind.codebook is not None
        element = kind.name if is_own else qn.get_qtype(kind.storage_dtype).name
        if self.act_order:
            order = np.argsort(-np.diag(gram), kind="stable")
        else:
            order = np.arange(len(gram))
        upper = self._factor(weight, gram[np.ix_(order, order)])
        w, s, z, m = (None if part is None else part[step][order] for part in (weight.w, *grid))
        qvalue = _qvalue(w, jnp.asarray(upper, jnp.float32), s, z, m, element, self.block)
        weight.choose(step, qvalue[np.argsort(order)])

    def _factor(self, weight: Weight, gram: np.ndarray) -> np.ndarray:
        """Return upper triangular ``U`` with ``U.T @ U = inv(H)``, ``H`` damped."""
        diagonal = np.diag(gram)
        # A channel that was always 0 adds nothing to results; 1 keeps the matrix invertible.
        damp = np.where(diagonal > 0, self.damping * diagonal.mean(), 1.0)
        try:
            if not np.isfinite(gram).all():
                raise np.linalg.LinAlgError("the activations are not finite")
            # H = M @ M.T with M upper triangular, by reversing the order twice: U = inv(M).
            backwards = (gram + np.diag(damp))[::-1, ::-1]
            lower = np.asarray(scipy.linalg.cholesky(backwards, lower=True))
            upper = scipy.linalg.solve_triangular(lower[::-1, ::-1], np.eye(len(gram)))
            return np.asarray(upper)
        except np.linalg.LinAlgError as error:
            raise QuantizationError(
                f"Gptq can't solve for {weight.path} ({error}). Choose a larger damping than "
                f"{self.damping}, or give it more batches."
            ) from error


@functools.partial(jax.jit, static_argnums=(5, 6))
def _qvalue(
    w: jax.Array,
    upper: jax.Array,
    scale: jax.Array,
    zero: jax.Array | None,
    keep: jax.Array | None,
    qtype: str,
    block: int,
) -> jax.Array:
    """Return quantized values as float32 [K, N], channels in rounding order.

    ``upper`` is the factor of the inverse, [K, K]; ``block`` rows are rounded at a time.
    """
    # Row k of `upper`, over its diagonal element, is how far an error of channel k moves each later
    # one. Within a block that is done channel by channel, and for the rest by one matmul.
    k = w.shape[0]
    block = min(block, k)
    pad = -k % block
    kind = qn.get_qtype(qtype)
    copies = kind.block or 1  # no part of a block of a codebook is a QArray: it holds one number

    def padded(x: jax.Array | None, value: float = 0) -> jax.Array | None:
        return None if x is None else jnp.pad(x, ((0, pad), (0, 0)), constant_values=value)

    w = jnp.pad(w, ((0, pad), (0, 0)))
    upper = jnp.pad(upper, ((0, pad), (0, pad))) + jnp.diag(jnp.arange(k + pad) >= k).astype(
        upper.dtype
    )
    parts = (padded(scale, 1), padded(zero), padded(keep))
    blocks = jax.tree.map(lambda x: x.reshape(-1, block, x.shape[-1]), parts)

    def one_block(w: jax.Array, given: tuple) -> tuple[jax.Array, jax.Array]:
        start, parts = given
        across = lax.dynamic_slice_in_dim(upper, start, block, axis=0)
        own = lax.dynamic_slice_in_dim(across, start, block, axis=1)

        def one_row(rows: jax.Array, given: tuple) -> tuple[jax.Array, tuple]:
            i, (scale, zero, keep) = given
            row = rows[i]
            wanted = row if keep is None else jnp.where(keep, row, 0)
            point = None if zero is None else zero[None]
            wanted = jnp.broadcast_to(wanted, (copies, *wanted.shape))
            q = qn.quantize_with(wanted, qtype, scale[None].astype(kind.scale_dtype), point)
            error = (row - qn.dequantize(q)[0]) / own[i, i]
            return rows - own[i][:, None] * error, (q.qvalue[0].astype(jnp.float32), error)

        rows = lax.dynamic_slice_in_dim(w, start, block, axis=0)
        _, (qvalue, errors) = lax.scan(one_row, rows, (jnp.arange(block), parts))
        return w - jnp.matmul(across.T, errors, precision="highest"), qvalue

    starts = jnp.arange(0, k + pad, block)
    _, qvalue = lax.scan(one_block, w, (starts, blocks))
    return qvalue.reshape(k + pad, -1)[:k]
