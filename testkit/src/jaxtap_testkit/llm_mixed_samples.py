"""Decoders whose layers differ, in float64: one position, one head and one expert at a time.

Written from the definitions, with the names of the published folders, for Llama 4, Gemma 4 and
Qwen 3.5.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np


class Reference:
    """What the families share.

    Args:
        fields: of config.json.
        tensors: by their names in a folder.
        cached: from which position on keys and values are those of an int8 cache; None for never.
        rows: what inputs of weights become first.
    """

    def __init__(
        self, fields: dict[str, Any], tensors: dict[str, Any], cached: int | None,
        rows: Callable[[Any], Any],
    ):  # fmt: skip
        self.fields, self.cached, self.rows = fields, cached, rows
        self.t = {name: np.asarray(x, np.float64) for name, x in tensors.items()}
        self.heads, self.groups = fields["num_attention_heads"], fields["num_key_value_heads"]
        self.kept: dict[str, Any] = {}

    def logits(self, tokens: Any) -> Any:
        """Return float64 ``[length, vocabulary]``."""
        x = self.t["model.embed_tokens.weight"][tokens] * self.embed_scale()
        self.tokens, self.embedded = tokens, x
        for i in range(self.fields["num_hidden_layers"]):
            x = self.layer(i, x)
        table = self.t.get("lm_head.weight", self.t["model.embed_tokens.weight"])
        out = self.rows(self.norm("model.norm", x)) @ table.T
        cap = self.fields.get("final_logit_softcapping")
        return cap * np.tanh(out / cap) if cap else out

    def embed_scale(self) -> float:
        """Return what embeddings are multiplied with."""
        return 1.0

    def layer(self, i: int, x: Any) -> Any:
        """Return what layer i makes of ``[length, width]``."""
        raise NotImplementedError

    def unit(self, x: Any) -> Any:
        """Return x with a root mean square of 1."""
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.fields["rms_norm_eps"])

    def norm(self, name: str, x: Any) -> Any:
        """Return a norm by the name of its module."""
        return self.unit(x) * self.t[f"{name}.weight"]

    def times(self, name: str, x: Any) -> Any:
        """Return x times a weight by the name of its module."""
        return self.rows(x) @ self.t[f"{name}.weight"].T

    def gated(self, at: str, x: Any, act: Callable[[Any], Any]) -> Any:
        """Return an MLP with a gate."""
        inner = act(self.times(f"{at}.gate_proj", x)) * self.times(f"{at}.up_proj", x)
        return self.times(f"{at}.down_proj", inner)

    def attend(self, q: Any, k: Any, v: Any, scale: float, sees: Callable[[int, int], bool]) -> Any:
        """Return each head's mixture of values, ``[length, heads, size]``."""
        out = np.zeros(q.shape)
        for n in range(len(q)):
            places = [m for m in range(n + 1) if sees(n, m)]
            for h in range(q.shape[1]):
                g = h // (q.shape[1] // k.shape[1])
                keys, values = k[places, g], v[places, g]
                if self.cached is not None and n >= self.cached:
                    keys, values = rounded(keys), rounded(values)
                weights = np.exp(keys @ q[n, h] * scale)
                out[n, h] = weights @ values / weights.sum()
        return out


def rounded(rows: Any) -> Any:
    """Return rows as int8 with a scale each."""
    step = np.abs(rows).max(-1, keepdims=True) / 127
    return np.round(rows / step) * step


def sigmoid(x: Any) -> Any:
    """Return the logistic function."""
    return 1 / (1 + np.exp(-x))


def silu(x: Any) -> Any:
    """Return x times its logistic function."""
    return x * sigmoid(x)


def gelu(x: Any) -> Any:
    """Return gelu by tanh."""
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


class Llama4(Reference):
    """Chunks, layers without positions, and experts that see scaled inputs."""

    def layer(self, i: int, x: Any) -> Any:
        """Return what layer i makes of ``[length, width]``."""
        at = f"model.layers.{i}"
        x = x + self.attention(i, self.norm(f"{at}.input_layernorm", x))
        y = self.norm(f"{at}.post_attention_layernorm", x)
        step = self.fields["interleave_moe_layer_step"]
        if (i + 1) % step:
            return x + self.gated(f"{at}.feed_forward", y, silu)
        return x + np.array([self.experts(f"{at}.feed_forward", row) for row in y])

    def attention(self, i: int, x: Any) -> Any:
        """Return what attention adds."""
        at, f = f"model.layers.{i}.self_attn", self.fields
        size, turns = f["head_dim"], (i + 1) % f["no_rope_layer_interval"] != 0
        q, k, v = (self.times(f"{at}.{one}_proj", x).reshape(len(x), -1, size) for one in "qkv")
        for n in range(len(x)):
            if not turns:
                scale = math.log1p((n + 1) // f["floor_scale"]) * f["attn_scale"] + 1
                q[n] *= scale
                continue
            for head in (*q[n], *k[n]):
                for j in range(size // 2):
                    pair = complex(head[2 * j], head[2 * j + 1])
                    pair *= np.exp(1j * n * f["rope_theta"] ** (-2 * j / size))
                    head[2 * j], head[2 * j + 1] = pair.real, pair.imag
            q[n], k[n] = self.unit(q[n]), self.unit(k[n])
        chunk = f["attention_chunk_size"] if turns else len(x)
        mixed = self.attend(q, k, v, size**-0.5, lambda n, m: n // chunk == m // chunk)
        return self.times(f"{at}.o_proj", mixed.reshape(len(x), -1))

    def experts(self, at: str, row: Any) -> Any:
        """Return the shared expert, and those with the highest scores, of one position."""
        total = self.gated(f"{at}.shared_expert", row, silu)
        scores = self.t[f"{at}.router.weight"] @ row
        for e in np.argsort(-scores)[: self.fields["num_experts_per_tok"]]:
            seen = row * sigmoid(scores[e])
            gate, up = np.split(self.rows(seen) @ self.t[f"{at}.experts.gate_up_proj"][e], 2)
            total = total + self.rows(silu(gate) * up) @ self.t[f"{at}.experts.down_proj"][e]
        return total


class Gemma4(Reference):
    """Larger heads without windows, layers that attend to others' keys, inputs of each layer."""

    def embed_scale(self) -> float:
        """Return what embeddings are multiplied with."""
        return self.fields["hidden_size"] ** 0.5

    def layer(self, i: int, x: Any) -> Any:
        """Return what layer i makes of ``[length, width]``."""
        at, f = f"model.layers.{i}", self.fields
        y = self.attention(i, self.norm(f"{at}.input_layernorm", x))
        x = x + self.norm(f"{at}.post_attention_layernorm", y)
        y = self.gated(f"{at}.mlp", self.norm(f"{at}.pre_feedforward_layernorm", x), gelu)
        if f.get("enable_moe_block"):
            routed = np.array([self.experts(at, row) for row in x])
            y = self.norm(f"{at}.post_feedforward_layernorm_1", y)
            y = y + self.norm(f"{at}.post_feedforward_layernorm_2", routed)
        x = x + self.norm(f"{at}.post_feedforward_layernorm", y)
        if f["hidden_size_per_layer_input"]:
            y = gelu(self.times(f"{at}.per_layer_input_gate", x)) * self.inputs(i)
            y = self.times(f"{at}.per_layer_projection", y)
            x = x + self.norm(f"{at}.post_per_layer_input_norm", y)
        return x * self.t[f"{at}.layer_scalar"]

    def inputs(self, i: int) -> Any:
        """Return what layer i gets of the tokens."""
        size = self.fields["hidden_size_per_layer_input"]
        part = slice(i * size, (i + 1) * size)
        own = self.t["model.embed_tokens_per_layer.weight"][self.tokens][:, part] * size**0.5
        weight = self.t["model.per_layer_model_projection.weight"][part]
        rest = self.rows(self.embedded) @ weight.T * self.fields["hidden_size"] ** -0.5
        return (own + self.norm("model.per_layer_projection_norm", rest)) / math.sqrt(2)

    def attention(self, i: int, x: Any) -> Any:
        """Return what attention adds."""
        at, f = f"model.layers.{i}.self_attn", self.fields
        kind = f["layer_types"][i]
        local = kind == "sliding_attention"
        size = f["head_dim"] if local else f["global_head_dim"]
        theta, share = (1e4, 1.0) if local else (1e6, 0.25)

        def turned(name: str, x: Any) -> Any:
            x = self.norm(name, x.reshape(len(x), -1, size))
            out = x.copy()
            for n in range(len(x)):
                for j in range(int(share * size) // 2):
                    angle = n * theta ** (-2 * j / size)
                    a, b = x[n, :, j], x[n, :, j + size // 2]
                    out[n, :, j] = a * math.cos(angle) - b * math.sin(angle)
                    out[n, :, j + size // 2] = b * math.cos(angle) + a * math.sin(angle)
            return out

        q = turned(f"{at}.q_norm", self.times(f"{at}.q_proj", x))
        if i < f["num_hidden_layers"] - f.get("num_kv_shared_layers", 0):
            keys = self.times(f"{at}.k_proj", x)
            equal = f.get("attention_k_eq_v") and not local
            values = keys if equal else self.times(f"{at}.v_proj", x)
            values = self.unit(values.reshape(len(x), -1, size))
            self.kept[kind] = turned(f"{at}.k_norm", keys), values
        window = f["sliding_window"] if local else len(x)
        mixed = self.attend(q, *self.kept[kind], 1.0, lambda n, m: n - m < window)
        return self.times(f"{at}.o_proj", mixed.reshape(len(x), -1))

    def experts(self, at: str, row: Any) -> Any:
        """Return the sum of a position's experts."""
        scale = self.t[f"{at}.router.scale"] * self.fields["hidden_size"] ** -0.5
        chances = np.exp(self.t[f"{at}.router.proj.weight"] @ (self.unit(row) * scale))
        best = np.argsort(-chances)[: self.fields["top_k_experts"]]
        weights = chances[best] / chances[best].sum()
        y, total = self.norm(f"{at}.pre_feedforward_layernorm_2", row), 0.0
        for weight, e in zip(weights * self.t[f"{at}.router.per_expert_scale"][best], best,
                             strict=True):  # fmt: skip
            gate, up = np.split(self.t[f"{at}.experts.gate_up_proj"][e] @ self.rows(y), 2)
            down = self.t[f"{at}.experts.down_proj"][e]
            total = total + weight * (down @ self.rows(gelu(gate) * up))
        return total


class Qwen35(Reference):
    """Gated delta rules, position by position, and gated attention."""

    def norm(self, name: str, x: Any) -> Any:
        """Return a norm by the name of its module: the files have what is added to 1."""
        return self.unit(x) * (1 + self.t[f"{name}.weight"])

    def layer(self, i: int, x: Any) -> Any:
        """Return what layer i makes of ``[length, width]``."""
        at = f"model.layers.{i}"
        linear = self.fields["layer_types"][i] == "linear_attention"
        y = self.norm(f"{at}.input_layernorm", x)
        x = x + (self.delta(f"{at}.linear_attn", y) if linear else self.attention(at, y))
        y = self.norm(f"{at}.post_attention_layernorm", x)
        if "num_experts" not in self.fields:
            return x + self.gated(f"{at}.mlp", y, silu)
        return x + np.array([self.experts(f"{at}.mlp", row) for row in y])

    def delta(self, at: str, x: Any) -> Any:
        """Return what a gated delta rule adds."""
        f = self.fields
        keys, values = f["linear_num_key_heads"], f["linear_num_value_heads"]
        size, value_size = f["linear_key_head_dim"], f["linear_value_head_dim"]
        inputs, kernel = self.times(f"{at}.in_proj_qkv", x), self.t[f"{at}.conv1d.weight"][:, 0]
        taps = kernel.shape[1]
        z = self.times(f"{at}.in_proj_z", x).reshape(len(x), values, value_size)
        b, a = (x @ self.t[f"{at}.in_proj_{one}.weight"].T for one in "ba")
        out = np.zeros((len(x), values, value_size))
        for h in range(values):
            state = np.zeros((size, value_size))
            for n in range(len(x)):
                taken = [m for m in range(n - taps + 1, n + 1) if m >= 0]
                mixed = silu(sum(inputs[m] * kernel[:, m - n + taps - 1] for m in taken))
                q, k, v = np.split(mixed, [keys * size, 2 * keys * size])
                g = h // (values // keys)
                q, k = (one[g * size : (g + 1) * size] for one in (q, k))
                q, k = (one / np.sqrt((one * one).sum() + 1e-6) for one in (q, k))
                v = v[h * value_size : (h + 1) * value_size]
                speed = math.exp(self.t[f"{at}.A_log"][h])
                fade = math.exp(-speed * np.logaddexp(0, a[n, h] + self.t[f"{at}.dt_bias"][h]))
                state = state * fade
                state = state + np.outer(k, sigmoid(b[n, h]) * (v - k @ state))
                out[n, h] = q @ state / math.sqrt(size)
        out = self.unit(out) * self.t[f"{at}.norm.weight"] * silu(z)
        return self.times(f"{at}.out_proj", out.reshape(len(x), -1))

    def attention(self, at: str, x: Any) -> Any:
        """Return what attention adds."""
        at, f = f"{at}.self_attn", self.fields
        size = f["head_dim"]
        both = self.times(f"{at}.q_proj", x).reshape(len(x), self.heads, 2, size)
        k, v = (self.times(f"{at}.{one}_proj", x).reshape(len(x), -1, size) for one in "kv")
        q, k = self.norm(f"{at}.q_norm", both[:, :, 0]), self.norm(f"{at}.k_norm", k)
        rope = f["rope_parameters"]
        half = int(size * rope["partial_rotary_factor"]) // 2
        for n in range(len(x)):
            for head in (*q[n], *k[n]):
                old = head.copy()
                for j in range(half):
                    angle = n * rope["rope_theta"] ** (-j / half)
                    head[j] = old[j] * math.cos(angle) - old[j + half] * math.sin(angle)
                    head[j + half] = old[j + half] * math.cos(angle) + old[j] * math.sin(angle)
        mixed = self.attend(q, k, v, size**-0.5, lambda n, m: True) * sigmoid(both[:, :, 1])
        return self.times(f"{at}.o_proj", mixed.reshape(len(x), -1))

    def experts(self, at: str, row: Any) -> Any:
        """Return the shared expert through its gate, and those that are chosen."""
        total = self.gated(f"{at}.shared_expert", row, silu)
        total = total * sigmoid(self.t[f"{at}.shared_expert_gate.weight"] @ row)
        chances = np.exp(self.t[f"{at}.gate.weight"] @ row)
        best = np.argsort(-chances)[: self.fields["num_experts_per_tok"]]
        for e in best:
            y = self.gated(f"{at}.experts.{e}", row, silu)
            total = total + chances[e] / chances[best].sum() * y
        return total


REFERENCES = {
    "llama4_text": Llama4,
    "gemma4_text": Gemma4,
    "qwen3_5_text": Qwen35,
    "qwen3_5_moe_text": Qwen35,
}
