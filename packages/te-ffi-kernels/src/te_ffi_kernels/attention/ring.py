"""Attention whose sequence is shared out: blocks of keys go around a ring of devices.

Each device has a block of queries and one of keys. In each of as many rounds as there are devices,
it attends to the keys that it has and sends them to the next device (Liu et al. 2023, "Ring
Attention", https://arxiv.org/abs/2310.01889). Results of rounds are merged by the log-sum-exp of
their scores, as those of blocks inside of a kernel are. In the backward pass the gradients of keys
go around with the keys, in float32.

A program has one kernel call for each different cut of two blocks (see ``blocks``), whatever the
number of devices. Operands are those of the kernels: an array with an axis of queries or keys is
the device's block of it, a bias has the rows of its queries and the columns of all keys, and
lengths are those of whole sequences.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..op import varying_as
from . import operands
from .blocks import Cut, cuts, lengths_in
from .config import Config, Sizes, sizes_of
from .types import AttnSoftmaxType, QKVLayout

Arrays = tuple[jax.Array, ...]
Run = Callable[..., Any]


def forward(run: Run, axes: Sequence[str], config: Config, *given: jax.Array) -> Arrays:
    """Return a device's block of the forward kernel's results.

    Args:
        run: the kernel, called as ``run(config, *operands)``.
        axes: the mesh axes that the sequence is shared out along.
        config: config of the whole attention.
        given: the kernel's operands.

    Returns:
        The blocks of the result and of the log-sum-exp, and the random state.
    """
    ring = _Ring(axes, config, given)
    queries, keys = ring.queries_and_keys(given[: config.layout.arrays])
    offset, seed = given[4:6]

    def attend(cut: Cut, keys: Arrays, block: jax.Array) -> Arrays:
        out, aux, _ = run(
            cut.config,
            *operands.arrays((queries[:, cut.queries :], *(x[:, cut.keys :] for x in keys))),
            ring.bias_of(cut, block),
            jnp.zeros((0,), jnp.float32),
            seed,
            *ring.lengths_of(cut, block),
        )
        out = _after(cut.queries, 1, out.astype(jnp.float32))
        return out, _after(cut.queries, 2, aux, -jnp.inf)

    sizes = ring.sizes
    nothing = varying_as(
        given,
        jnp.zeros(sizes.out, jnp.float32),
        jnp.full(sizes.aux(config.layout), -jnp.inf, jnp.float32),
    )

    def turn(i: Any, carry: Any) -> Any:
        keys, found = carry
        following = ring.passed(keys)  # sent while they are used
        return following, _merged(found, ring.met(i, attend, nothing, keys))

    keys, found = lax.fori_loop(0, ring.count - 1, turn, (keys, nothing))
    out, aux = _merged(found, ring.met(ring.count - 1, attend, nothing, keys))
    if config.softmax_type is not AttnSoftmaxType.VANILLA_SOFTMAX:
        total = jnp.where(ring.are_queries(), jnp.logaddexp(aux, offset), -jnp.inf)
        out, aux = out * _share(aux, total), total
    return out.astype(queries.dtype), aux, operands.random_state(seed)


def backward(run: Run, axes: Sequence[str], config: Config, *given: jax.Array) -> Arrays:
    """Return a device's gradients of the first five operands.

    Those of the bias and of the offset are sums over the queries that the device has.

    The arguments are those of ``forward``, with the operands of the kernel of gradients.
    """
    ring = _Ring(axes, config, given)
    count = config.layout.arrays
    queries, keys = ring.queries_and_keys(given[:count])
    bias, offset, aux, random, out, grad = given[3:9]

    def attend(cut: Cut, keys: Arrays, block: jax.Array) -> Arrays:
        rows, columns = cut.queries, cut.keys
        *grads, bias_grad, _ = run(
            cut.config,
            *operands.arrays((queries[:, rows:], *(x[:, columns:] for x in keys))),
            ring.bias_of(cut, block),
            jnp.zeros((0,), jnp.float32),
            aux[:, :, rows:],
            random,
            out[:, rows:],
            grad[:, rows:],
            *ring.lengths_of(cut, block),
        )
        before = rows, *(columns,) * len(keys)
        found = [_after(n, 1, x.astype(jnp.float32)) for n, x in zip(before, grads, strict=False)]
        if config.has_bias:
            bias_grad = _after(columns, 3, _after(rows, 2, bias_grad))
        return *found, bias_grad

    keys_width = ring.sizes.kv_length
    columns = bias[..., :keys_width] if config.has_bias else bias
    arrays = queries, *keys
    nothing = varying_as(
        given,
        *(jnp.zeros(x.shape, jnp.float32) for x in arrays),
        jnp.zeros(columns.shape, columns.dtype),
    )

    def turn(i: Any, carry: Any) -> Any:
        keys, (query_grad, *key_grads), bias_grad = carry
        following = ring.passed(keys)
        query_part, *parts, bias_part = ring.met(i, attend, nothing, keys)
        key_grads = ring.passed([x + part for x, part in zip(key_grads, parts, strict=True)])
        if config.has_bias:
            at = (0, 0, 0, ring.block(i) * keys_width)
            bias_grad = lax.dynamic_update_slice(bias_grad, bias_part, at)
        return following, (query_grad + query_part, *key_grads), bias_grad

    start = keys, nothing[:-1], *varying_as(given, jnp.zeros(bias.shape, bias.dtype))
    # In the last round keys come home with their gradients.
    _, grads, bias_grad = lax.fori_loop(0, ring.count, turn, start)
    offset_grad = jnp.zeros_like(offset)
    if config.softmax_type is not AttnSoftmaxType.VANILLA_SOFTMAX:
        delta = jnp.sum(grad.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
        sink = _share(offset, aux)
        offset_grad = -jnp.sum(sink * delta[..., None], axis=(0, 1)).reshape(offset.shape)
    found = tuple(x.astype(queries.dtype) for x in grads)
    if config.layout.is_qkvpacked():
        found = (jnp.concatenate([found[0][:, :, None], found[1]], axis=2),)
    return *operands.arrays(found), bias_grad, offset_grad


class _Ring:
    """What a device knows of the ring."""

    def __init__(self, axes: Sequence[str], config: Config, given: Arrays) -> None:
        self.axes, self.config, self.given = tuple(axes), config, given
        self.sizes: Sizes = sizes_of("fused_attn", given[: config.layout.arrays], config.layout)
        self.count = lax.axis_size(self.axes)
        self.rank = lax.axis_index(self.axes).astype(jnp.int32)
        self._cuts, table = cuts(config, self.sizes, self.count)
        self._row = jnp.asarray(table)[self.rank]

    def queries_and_keys(self, qkv: Arrays) -> tuple[jax.Array, Arrays]:
        """Return queries, and the arrays of keys and values that go around."""
        if self.config.layout is QKVLayout.BS3HD:
            return qkv[0][:, :, 0], (qkv[0][:, :, 1:],)
        return qkv[0], qkv[1:]

    def block(self, i: Any) -> jax.Array:
        """Return the index of the device's block of keys in round `i`."""
        return (self.rank - i) % self.count

    def passed(self, tree: Any) -> Any:
        """Send arrays to the next device; return those of the last one."""
        ring = [(i, (i + 1) % self.count) for i in range(self.count)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axes, ring), tree)

    def met(self, i: Any, attend: Callable[..., Arrays], nothing: Arrays, keys: Arrays) -> Arrays:
        """Attend to the keys that the device has in round `i`."""
        block = self.block(i)
        ways = [
            (lambda *_: nothing) if cut is None else functools.partial(attend, cut)
            for cut in self._cuts
        ]
        return lax.switch(self._row[block], ways, keys, block)

    def bias_of(self, cut: Cut, block: jax.Array) -> jax.Array:
        """Return the bias for the queries and the keys of a cut."""
        bias, keys = self.given[3], self.sizes.kv_length
        if not self.config.has_bias:
            return bias
        columns = lax.dynamic_slice_in_dim(bias, block * keys, keys, axis=3)
        return columns[:, :, cut.queries :, cut.keys :]

    def lengths_of(self, cut: Cut, block: jax.Array) -> Arrays:
        """Return the sequences in a cut, as kernels take them."""
        queries, keys, *starts = self.given[-4:]
        return (
            lengths_in(queries, self.rank, self.sizes.q_length, cut.queries),
            lengths_in(keys, block, self.sizes.kv_length, cut.keys),
            *starts,
        )

    def are_queries(self) -> jax.Array:
        """Return which queries are in a sequence, bool ``[batch, 1, queries, 1]``."""
        size = self.sizes.q_length
        here = lengths_in(self.given[-4], self.rank, size, 0)
        return (jnp.arange(size)[None] < here[:, None])[:, None, :, None]


def _merged(found: Arrays, more: Arrays) -> Arrays:
    """Merge attention over two sets of keys, by their log-sum-exp."""
    aux = jnp.logaddexp(found[1], more[1])
    return found[0] * _share(found[1], aux) + more[0] * _share(more[1], aux), aux


def _share(part: jax.Array, whole: jax.Array) -> jax.Array:
    """Return the share of a part in a softmax, ``exp(part - whole)``.

    Both are ``[batch, heads, queries, 1]``; the result is ``[batch, queries, heads, 1]``.
    """
    some = whole != -jnp.inf
    return jnp.where(some, jnp.exp(part - jnp.where(some, whole, 0)), 0).swapaxes(1, 2)


def _after(count: int, axis: int, x: jax.Array, fill: float = 0) -> jax.Array:
    """Pad an array with `count` entries before its first one."""
    if not count:
        return x
    widths = [(count if i == axis else 0, 0) for i in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=fill)
