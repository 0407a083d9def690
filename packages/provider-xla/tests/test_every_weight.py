"""Every parameter that a quantized operation reads is stored, or a problem names it.

Random programs choose, mask, move and carry their weights, in loops, branches and closures. Each
knows which parameters its products read, whatever the plan says. Parameters and all that is
computed of them are zero, or plus or minus one number, so that quantized values stand for them
exactly, four bits too: a wrong choice shows in the results.
"""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from provider_xla import PtqProvider, QuantizationRule, QuantizationWarning

N = 8  # all matrices are [N, N], so that each weight fits each place
STEPS = 3
PROGRAMS = 10
SEEDS = 8  # with 200, which take a quarter of an hour of a core, 2,000 programs
MASK = np.random.default_rng(0).random((N, N)) < 0.5
FACTORS = MASK.astype(np.float32)
ORDER = np.random.default_rng(1).permutation(N)


@dataclasses.dataclass(frozen=True)
class Node:
    """A weight, or what is done with one: a name, and what it is made of."""

    name: str
    parts: tuple = ()

    def __str__(self):
        return f"{self.name}({', '.join(map(str, self.parts))})" if self.parts else self.name

    def reads(self):
        """Return the parameters behind it."""
        own = {self.name[0]} if self.name in ZERO else ALSO.get(self.name, set())
        return own.union(*(part.reads() for part in self.parts))


# What a program is run with besides its parameters: a flag, an index, masks, a key.
def given(rows, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "x": jnp.asarray(rng.integers(-2, 3, (rows, N)), jnp.float32),
        "flag": jnp.asarray(bool(seed % 2)),
        "i": jnp.asarray(seed % STEPS, jnp.int32),
        "mask": jnp.asarray(rng.random((N, N)) < 0.5),
        "floats": jnp.asarray(rng.random((N, N)) < 0.5, jnp.float32),
        "columns": jnp.asarray(rng.random(N) < 0.5),
        "key": jax.random.key(seed),
    }


LEAVES = {"a": (N, N), "b": (N, N), "s": (STEPS, N, N), "m": (N, N), "t": (2 * N, N)}
ALSO = {"steps": {"s"}}  # a use that reads a parameter beside its weights


ONE = 0.25


def computed(w):
    """Return the values of w, by arithmetic that is no view of it."""
    return w * jnp.abs(w) / ONE


def kept(key):
    return jax.random.bernoulli(key, 0.5, (N, N)).astype(jnp.float32)


def swapped(g, w, v):
    return lax.fori_loop(0, g["i"], lambda _, c: (c[1], c[0]), (w, v))[0]


# Called with the program's parameters, what is given, and the values of the parts.
WEIGHTS = {
    "a": lambda p, g: p["a"],
    "b": lambda p, g: p["b"],
    "s[1]": lambda p, g: p["s"][1],
    "s[i]": lambda p, g: p["s"][g["i"]],
    "s of unstack": lambda p, g: jnp.unstack(p["s"])[2],
    "t of split": lambda p, g: jnp.split(p["t"], 2)[1],
    "transpose": lambda p, g, w: w.T,
    "flip": lambda p, g, w: jnp.flip(w, 0),
    "roll": lambda p, g, w: jnp.roll(w, 2, 1),
    "permute": lambda p, g, w: w[:, ORDER],
    "reshape": lambda p, g, w: w.reshape(2, N // 2, N).reshape(N, N),
    "negative": lambda p, g, w: -w,
    "computed": lambda p, g, w: computed(w),
    "constant mask": lambda p, g, w: w * FACTORS,
    "mask of a parameter": lambda p, g, w: jnp.where(p["m"] > 0, w, 0),
    "given mask": lambda p, g, w: jnp.where(g["mask"], w, 0),
    "given factor": lambda p, g, w: w * g["mask"].astype(w.dtype),
    "given floats": lambda p, g, w: w * g["floats"],
    "given bound": lambda p, g, w: jnp.minimum(w, ONE + g["floats"][0, 0]),
    "given noise": lambda p, g, w: w + ONE * g["floats"],
    "key": lambda p, g, w: w * kept(g["key"]),
    "key of a constant": lambda p, g, w: w * kept(jax.random.key(3)),
    "jit": lambda p, g, w: jax.jit(lambda w: w.T)(w),
    "remat": lambda p, g, w: jax.checkpoint(lambda w: w.T)(w),
    "where": lambda p, g, w, v: jnp.where(g["flag"], w, v),
    "where by column": lambda p, g, w, v: jnp.where(g["columns"], w, v),
    "where by row": lambda p, g, w, v: jnp.where(g["columns"][:, None], w, v),
    "where by element": lambda p, g, w, v: jnp.where(g["mask"], w, v),
    "where of a constant": lambda p, g, w, v: jnp.where(MASK, w, v),
    "select_n": lambda p, g, w, v: lax.select_n(g["i"], w, v, w),
    "cond": lambda p, g, w, v: lax.cond(g["flag"], lambda: w, lambda: v),
    "cond of operands": lambda p, g, w, v: lax.cond(
        g["i"] > 1, lambda w, v: v.T, lambda w, v: w, w, v
    ),
    "cond of computed": lambda p, g, w, v: lax.cond(g["flag"], lambda: computed(w), lambda: v),
    "switch": lambda p, g, w, v: lax.switch(g["i"], [lambda: w, lambda: v, lambda: w.T]),
    "jitted cond": lambda p, g, w, v: jax.jit(
        lambda w, v: lax.cond(g["flag"], lambda: w, lambda: v)
    )(w, v),
    "swap": lambda p, g, w, v: swapped(g, w, v),
    "loop of stack": lambda p, g, w, v: lax.fori_loop(
        0, g["i"], lambda i, c: jnp.stack([w, v])[i % 2], w
    ),
    "halves": lambda p, g, w, v: jnp.concatenate([w[: N // 2], v[N // 2 :]]),
    "stack and index": lambda p, g, w, v: jnp.stack([w, v])[g["i"] % 2],
    "write": lambda p, g, w, v: lax.dynamic_update_slice(w, v[:2], (g["i"], 0)),
    "rows of another": lambda p, g, w, v: w.at[g["i"]].set(v[0]),
    "product": lambda p, g, w, v: w * v / ONE,
}
TWO = {"where", "where by column", "where by row", "where by element", "where of a constant"}
TWO |= {"select_n", "cond", "cond of operands", "cond of computed", "switch", "jitted cond"}
TWO |= {"swap", "loop of stack", "halves", "stack and index", "write", "rows of another"}
TWO |= {"product"}
ZERO = {"a", "b", "s[1]", "s[i]", "s of unstack", "t of split"}


def ranged(x):
    """Return an activation in a range that no loop leaves."""
    return jnp.clip(jnp.round(x / 4), -2, 2)


def scanned(p, g, x, w):
    return lax.scan(lambda c, _: (ranged(c @ w), None), x, length=2)[0]


def carried(p, g, x, w, v):
    def step(c, _):
        x, w, v = c
        return (ranged(x @ w), v, w), None

    return lax.scan(step, (x, w, v), length=STEPS)[0][0]


def by_steps(p, g, x, w):
    def step(c, one):
        return ranged(c @ jnp.where(g["flag"], one, w)), None

    return lax.scan(step, x, p["s"])[0]


# Called with the program's parameters, what is given, an activation and weights.
USES = {
    "matmul": lambda p, g, x, w: x @ w,
    "einsum": lambda p, g, x, w: jnp.einsum("ri,io->ro", x, w),
    "weight first": lambda p, g, x, w: jnp.dot(w.T, x.T).T,
    "dot_general": lambda p, g, x, w: lax.dot_general(x, w, (((1,), (1,)), ((), ()))),
    "convolution": lambda p, g, x, w: lax.conv(x[:, :, None], w[:, :, None], (1,), "SAME")[..., 0],
    "jit": lambda p, g, x, w: jax.jit(lambda x, w: x @ w)(x, w),
    "jitted closure": lambda p, g, x, w: jax.jit(lambda x: x @ w)(x),
    "remat": lambda p, g, x, w: jax.checkpoint(lambda x, w: x @ w)(x, w),
    "vmap": lambda p, g, x, w: jax.vmap(lambda row: row @ w)(x),
    "loop": lambda p, g, x, w: lax.fori_loop(0, 2, lambda _, c: ranged(c @ w), x),
    "scan": scanned,
    "while": lambda p, g, x, w: lax.while_loop(
        lambda c: c[0] < g["i"] + 1, lambda c: (c[0] + 1, ranged(c[1] @ w)), (0, x)
    )[1],
    "branch": lambda p, g, x, w: lax.cond(g["flag"], lambda x: x @ w, lambda x: x, x),
    "branches": lambda p, g, x, w, v: lax.switch(g["i"], [lambda x: x @ w, lambda x: x @ v], x),
    "carry": carried,
    "steps": by_steps,
    "sum": lambda p, g, x, w, v: x @ w + x @ v,
    "lookup": lambda p, g, x, w: jnp.take(w, jnp.abs(x[:, 0]).astype(jnp.int32), axis=0),
    "rows": lambda p, g, x, w: w[jnp.abs(x[:, 0]).astype(jnp.int32)],
}
OF_TWO = {"branches", "carry", "sum"}


def weight(rng, depth):
    if depth == 0 or rng.random() < 0.2:
        return Node(str(rng.choice(sorted(ZERO))))
    name = str(rng.choice(sorted(WEIGHTS.keys() - ZERO)))
    return Node(name, tuple(weight(rng, depth - 1) for _ in range(1 + (name in TWO))))


def program(rng):
    name = str(rng.choice(sorted(USES)))
    depth = int(rng.integers(1, 4))
    return Node(name, tuple(weight(rng, depth) for _ in range(1 + (name in OF_TWO))))


def value(node, p, g):
    return WEIGHTS[node.name](p, g, *(value(part, p, g) for part in node.parts))


def run(node, p, g):
    with jax.named_scope("weights"):
        weights = [value(part, p, g) for part in node.parts]
    return USES[node.name](p, g, g["x"], *weights)


RULES = (
    {"weight_qtype": "int8"},
    {"weight_qtype": "int4", "tile_size": 4, "tile_fallback": "divisor"},
)


def planned(programs, params, rule):
    """Return the function of all programs, and their plan."""

    def fn(params, g):
        found = []
        for i, node in enumerate(programs):
            with jax.named_scope(f"program_{i}"):
                found.append(run(node, params[i], g))
        return found

    rules = [
        QuantizationRule(op_names=["take"], **rule),
        QuantizationRule(**rule),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", QuantizationWarning)
        return fn, PtqProvider(rules).plan(fn, params, given(2))


def signs(seed):
    rng = np.random.default_rng(seed)
    one = {name: rng.choice([-1.0, 1.0], shape) for name, shape in LEAVES.items()}
    return {name: jnp.asarray(w * ONE, jnp.float32) for name, w in one.items()}


def silent(programs, plan):
    """Return the parameters that are neither stored nor said, with their programs."""
    stored = set(plan.weights).union(*(w.derived.leaves for w in plan.derived.values()))
    found = []
    for i, node in enumerate(programs):
        for name in sorted(node.reads()):
            path = f"args[0][{i}]['{name}']"
            said = any(f"program_{i}/" in text and path in text for text in plan.problems)
            if path not in stored and not said:
                found.append(f"{path} of {node}")
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_generated_programs(seed):
    """Ten programs at a time: with one scale for each column, and with tiles."""
    rng = np.random.default_rng(seed)
    programs = [program(rng) for _ in range(PROGRAMS)]
    params = [signs(seed * PROGRAMS + i) for i in range(PROGRAMS)]
    fn, plan = planned(programs, params, RULES[seed % 2])
    assert silent(programs, plan) == []
    for path, _, why in plan.floats:
        i, name = int(path.split("[")[2][:-1]), path.split("'")[1]
        assert not why.startswith("no matmul") or name not in programs[i].reads()
    stored, tapped, plain = plan.quantize(params), jax.jit(plan.apply(fn)), jax.jit(fn)
    for flags in (2, 5):  # and another length than the plan's
        g = given(3, flags)
        results = zip(programs, tapped(stored, g), plain(params, g), strict=True)
        for node, found, wanted in results:
            np.testing.assert_allclose(found, wanted, rtol=0.02, atol=0.02, err_msg=str(node))
