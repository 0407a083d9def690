"""Quantizes a Flax model by the paths of its modules, and shows what became of each operation.

uv run python examples/flax_by_path.py
"""

import jax
import jax.numpy as jnp
from flax import linen

from provider_xla import PtqProvider, QuantizationRule


class Block(linen.Module):
    """A transformer block without its norms."""

    width: int

    @linen.compact
    def __call__(self, x):
        x = x + linen.MultiHeadDotProductAttention(4, name="attention")(x)
        return x + linen.Dense(self.width, name="down")(
            linen.gelu(linen.Dense(4 * self.width, name="up")(x))
        )


class Net(linen.Module):
    """Two blocks and a head."""

    @linen.compact
    def __call__(self, x):
        for i in range(2):
            x = Block(32, name=f"block_{i}")(x)
        return linen.Dense(10, name="head")(x.mean(axis=1))


RULES = [
    QuantizationRule(module_path="Net/head"),  # stays float
    QuantizationRule(module_path=".*/(up|down)", weight_qtype="int4", act_qtype="int8"),
    QuantizationRule(module_path=".*/attention.*", weight_qtype="int8", act_qtype="int8"),
]


def main():
    """Runs the model in float and quantized."""
    net = Net()
    x = jax.random.normal(jax.random.key(0), (8, 16, 32))
    params = net.init(jax.random.key(1), x)
    provider = PtqProvider(RULES)

    expected = net.apply(params, x)
    result = jax.jit(provider.apply(net.apply))(params, x)

    print(provider.report())
    error = jnp.linalg.norm(result - expected) / jnp.linalg.norm(expected)
    print(f"relative error of the logits: {error:.1%}")
    for rule in provider.get_unused_rules():
        print(f"unused: {rule}")


if __name__ == "__main__":
    main()
