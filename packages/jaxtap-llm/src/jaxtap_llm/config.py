"""What a decoder is, read from the ``config.json`` of a Hugging Face folder."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path

import numpy as np

from interception_core import JaxtapError


class LlmError(JaxtapError):
    """Something that the user gave can't be used. The message says what to do."""


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary positions: ``theta``, and how long contexts are reached.

    Attributes:
        theta: base of the frequencies.
        factor: by how much positions are stretched; 1 for not at all, infinite for no positions.
        llama3: None, or Llama 3's (low_freq_factor, high_freq_factor, trained length): frequencies
            above stay, those below are stretched, and between them it is a mixture.
        yarn: None, or YaRN's (Peng et al. 2023, arXiv:2309.00071; beta_fast, beta_slow, trained
            length, whether bounds are whole): the same by how often a frequency turns.
        scale: of cosines and sines.
    """

    theta: float
    factor: float = 1.0
    llama3: tuple[float, float, float] | None = None
    yarn: tuple[float, float, float, bool] | None = None
    scale: float = 1.0

    def frequencies(self, size):
        """Return float32 ``[size / 2]``, in radians per position."""
        plain = self.theta ** -(np.arange(0, size, 2, dtype=np.float64) / size)
        if self.yarn is not None:
            fast, slow, length, whole = self.yarn
            low, high = (
                size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(self.theta))
                for turns in (fast, slow)
            )
            if whole:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, size - 1)
            stretched = np.clip((np.arange(size // 2) - low) / max(high - low, 1e-3), 0, 1)
            return (plain * (1 - stretched + stretched / self.factor)).astype(np.float32)
        if self.llama3 is None:
            return (plain / self.factor).astype(np.float32)
        low, high, length = self.llama3
        turns = length * plain / (2 * math.pi)
        kept = np.clip((turns - low) / (high - low), 0, 1)
        return (plain * (kept + (1 - kept) / self.factor)).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Config:
    """A decoder. Hashable, so that it can be a static argument.

    Attributes:
        family: ``model_type`` of the file.
        windows: of each layer, the last positions that a query sees; 0 for all.
        ropes: rotary positions, and ``rope_of`` each layer's place among them.
        scale: of the scores.
        softcap: of the scores (Gemma 2), 0 for none; ``final_softcap`` of the logits.
        experts: 0 for a dense model; ``inner`` is the width of one expert then.
        biased: the projections that have a bias.
        sinks: whether each head has a score that no position has.
        limit: of what an expert's gate multiplies (gpt-oss); 0 for none.
        gemma: norms also behind attention and MLP, gelu, scaled embeddings.
    """

    family: str
    vocabulary: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    head_size: int
    windows: tuple[int, ...]
    ropes: tuple[Rope, ...]
    rope_of: tuple[int, ...]
    scale: float
    epsilon: float = 1e-6
    tied: bool = False
    biased: tuple[str, ...] = ()
    head_norms: bool = False
    softcap: float = 0.0
    final_softcap: float = 0.0
    experts: int = 0
    experts_per_token: int = 0
    normalize_experts: bool = True
    sinks: bool = False
    limit: float = 0.0
    gemma: bool = False

    @property
    def layers(self):
        """Number of layers."""
        return len(self.windows)


FAMILIES = (
    *("llama", "mistral", "mixtral", "phi3", "smollm3", "qwen2", "qwen3", "qwen3_moe", "gemma2"),
    *("gemma3_text", "gpt_oss"),
)
EXPERTS = ("qwen3_moe", "mixtral", "gpt_oss")
"""The families with experts."""
YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
DEFAULTS = {
    "mistral": {"sliding_window": 4096, "rms_norm_eps": 1e-6},
    "mixtral": {"rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "phi3": {"rms_norm_eps": 1e-5},
    "smollm3": {"rope_theta": 2e6, "tie_word_embeddings": True},
    "qwen2": {"max_window_layers": 28},
    "qwen3": {"max_window_layers": 28},
    "gemma2": {
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "head_dim": 256,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "head_dim": 256,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
    "gpt_oss": {
        "rms_norm_eps": 1e-5,
        "rope_theta": 1.5e5,
        "swiglu_limit": 7.0,
        "rope_scaling": YARN | {"truncate": False, "original_max_position_embeddings": 4096},
    },
}
"""What a config.json of a family may leave out."""


def read_config(folder: str | os.PathLike[str], quantized: bool = False) -> Config:
    """Return the ``Config`` of a folder, whose tensors may be quantized.

    Raises:
        LlmError: config.json is missing, or is of another family or form.
    """
    return parse_config(read_fields(folder), Path(folder) / "config.json", quantized)


def read_fields(folder):
    """Return what a folder's config.json has.

    Raises:
        LlmError: there is none, or it is not JSON.
    """
    path = Path(folder) / "config.json"
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise LlmError(
            f"{folder} must have a config.json, as Hugging Face's folders do."
        ) from error
    except ValueError as error:
        raise LlmError(f"{path} must be JSON, got: {error}.") from error


def parse_config(fields, path="config.json", quantized=False):
    """Return the ``Config`` of the fields of a config.json, whose tensors may be quantized."""
    if not isinstance(fields, dict):
        raise LlmError(f"{path} must be an object of fields, got a {type(fields).__name__}.")
    if fields.get("quantization_config") and not quantized:
        raise LlmError(
            f"{path}: quantization_config says that the tensors are quantized. Run generate on "
            "this folder as it is, or take that of the float model."
        )
    family = fields.get("model_type")
    if "rope_parameters" in fields and fields.get("rope_scaling"):
        raise LlmError(f"{path} must have rope_parameters or rope_scaling, got both.")
    defaults = DEFAULTS.get(family, {}) if isinstance(family, str) else {}
    if "rope_parameters" in fields:
        defaults = {name: value for name, value in defaults.items() if name != "rope_scaling"}
    # A null says that there is none of it.
    fields = {name: value for name, value in (defaults | fields).items() if value is not None}
    if "num_local_experts" in fields:  # as transformers writes all families
        fields.setdefault("num_experts", fields["num_local_experts"])
    if family not in FAMILIES:
        raise LlmError(
            f"{path}: model_type must be one of {', '.join(FAMILIES)}, got {family!r}. Only these "
            "families are written in jaxtap_llm/model.py."
        )
    _check_numbers(fields, path)
    try:
        return _parse(family, fields, path)
    except KeyError as error:
        raise LlmError(f"{path} must have {error.args[0]}, as {family}'s files do.") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise LlmError(f"{path} must be as {family}'s files are, got: {error}.") from error


COUNTS = {
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "intermediate_size", "moe_intermediate_size"),
    *("num_experts", "num_local_experts", "num_experts_per_tok", "sliding_window_pattern"),
    "no_rope_layer_interval",
}
NUMBERS = {"rms_norm_eps", "rope_theta", "rope_local_base_freq", "query_pre_attn_scalar"}
NUMBERS |= {"swiglu_limit"}
CAPS = {"attn_logit_softcapping", "final_logit_softcapping", "sliding_window"}


def _check_numbers(fields, path):
    """Check that sizes are whole numbers, and the others numbers, which may be 0 for caps."""
    for name in sorted(fields.keys() & (COUNTS | NUMBERS | CAPS)):
        value = fields[name]
        kinds, text = ((int,), "whole number") if name in COUNTS else ((int, float), "number")
        fits = isinstance(value, kinds) and not isinstance(value, bool)
        if not fits or value < 0 or (value == 0 and name not in CAPS):
            what = "0 or more" if name in CAPS else "above 0"
            raise LlmError(f"{path}: {name} must be a {text}, {what}, got {value!r}.")
    heads, groups = (fields.get(f"num_{one}_heads") for one in ("attention", "key_value"))
    if heads and groups and heads % groups:
        raise LlmError(
            f"{path}: num_attention_heads must be a multiple of num_key_value_heads, got {heads} "
            f"and {groups}."
        )
    if fields.get("num_experts_per_tok", 0) > fields.get("num_experts", math.inf):
        raise LlmError(f"{path}: num_experts_per_tok must be at most num_experts.")


def _check_forms(family, fields, path):
    """Check that the file asks for nothing that ``model`` does not compute."""
    ropes = fields.get("rope_parameters") or {}
    for one in (fields, ropes, *ropes.values()):
        if isinstance(one, dict) and one.get("partial_rotary_factor", 1) != 1:
            raise LlmError(
                f"{path}: partial_rotary_factor must be 1, got {one['partial_rotary_factor']}."
            )
    if fields.get("use_bidirectional_attention"):
        raise LlmError(f"{path}: use_bidirectional_attention must be false for {family}.")


def _parse(family, fields, path):
    _check_forms(family, fields, path)
    gemma, qwen3 = family.startswith("gemma"), family.startswith("qwen3")
    heads, width = fields["num_attention_heads"], fields["hidden_size"]
    size = fields.get("head_dim") or (128 if family.startswith("qwen3") else width // heads)
    if size % 2:
        raise LlmError(f"{path}: head_dim must be even, for rotary positions, got {size}.")
    windows = _windows(family, fields, path)
    ropes, rope_of = _ropes(family, fields, path, windows)
    _check_activation(family, fields, path)
    if family == "qwen3_moe" and (fields.get("mlp_only_layers") or _sparse_step(fields) != 1):
        raise LlmError(
            f"{path}: every layer must have experts (mlp_only_layers, decoder_sparse_step)."
        )
    if fields.get("mlp_bias") or (
        family not in ("qwen2", "gpt_oss") and fields.get("attention_bias")
    ):
        raise LlmError(f"{path}: attention_bias and mlp_bias must be false for {family}.")
    if family == "gpt_oss" and fields.get("attention_bias") is False:
        raise LlmError(f"{path}: attention_bias must be true for gpt_oss.")
    experts = fields["num_experts"] if family in EXPERTS else 0
    return Config(
        family=family,
        vocabulary=fields["vocab_size"],
        width=width,
        inner=fields["moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"],
        heads=heads,
        kv_heads=fields.get("num_key_value_heads") or heads,
        head_size=size,
        windows=windows,
        ropes=ropes,
        rope_of=rope_of,
        scale=(fields.get("query_pre_attn_scalar", size) if gemma else size) ** -0.5,
        epsilon=fields.get("rms_norm_eps", 1e-6),
        tied=fields.get("tie_word_embeddings", False),
        biased={"qwen2": ("qkv",), "gpt_oss": ("qkv", "out")}.get(family, ()),
        head_norms=qwen3 or family == "gemma3_text",
        softcap=(fields.get("attn_logit_softcapping") or 0.0) if gemma else 0.0,
        final_softcap=(fields.get("final_logit_softcapping") or 0.0) if gemma else 0.0,
        experts=experts,
        experts_per_token=fields["num_experts_per_tok"] if experts else 0,
        normalize_experts=family != "qwen3_moe" or fields.get("norm_topk_prob", False),
        sinks=family == "gpt_oss",
        limit=fields["swiglu_limit"] if family == "gpt_oss" else 0.0,
        gemma=gemma,
    )


def _sparse_step(fields):
    return fields.get("decoder_sparse_step", 1)


def _check_activation(family, fields, path):
    wanted = "gelu_pytorch_tanh" if family.startswith("gemma") else "silu"
    found = fields.get("hidden_activation") or fields.get("hidden_act") or wanted
    if found != wanted:
        raise LlmError(f"{path}: hidden_act must be {wanted} for {family}, got {found}.")


def _ropes(family, fields, path, windows):
    """Return rotary positions, and which of them each layer has."""
    rope, local = _of_layers(family, fields, path)
    others = [local is not None and window > 0 for window in windows]
    if family == "smollm3":
        every = fields.get("no_rope_layer_interval", 4)
        turns = fields.get("no_rope_layers") or [(i + 1) % every for i in range(len(windows))]
        if len(turns) != len(windows):
            raise LlmError(f"{path}: no_rope_layers must be of {len(windows)} layers.")
        local, others = Rope(1e4, math.inf), [not one for one in turns]
    return (rope,) if local is None else (rope, local), tuple(map(int, others))


def _of_layers(family, fields, path):
    """Return the rotary positions of the global layers, and of the local ones or None."""
    given = fields.get("rope_parameters") or {}
    by_layer = "full_attention" in given
    chosen = given["full_attention"] if by_layer else given or fields.get("rope_scaling") or {}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    theta = float(chosen.get("rope_theta") or fields.get("rope_theta") or 1e4)
    kind = chosen.get("rope_type", chosen.get("type", "default"))
    local = None
    if family == "gemma3_text":
        small = given.get("sliding_attention", {}) if by_layer else fields
        local = Rope(float(small.get("rope_theta" if by_layer else "rope_local_base_freq", 1e4)))
    if kind == "default":
        return Rope(theta), local

    def number(name):
        value = chosen[name]
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise LlmError(f"{path}: {name} of {kind} must be a number above 0, got {value!r}.")
        return value

    if kind == "linear":
        return Rope(theta, number("factor")), local
    if kind == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        if low >= high:
            raise LlmError(
                f"{path}: low_freq_factor must be below high_freq_factor, got {low} and {high}."
            )
        bounds = low, high, number("original_max_position_embeddings")
        return Rope(theta, number("factor"), bounds), local
    if kind == "yarn" and not {"mscale", "mscale_all_dim"} & chosen.keys():
        names = "original_max_position_embeddings", "max_position_embeddings"
        lengths = [one[name] for one in (chosen, fields) for name in names if name in one]
        if not lengths:
            raise LlmError(f"{path}: yarn needs {names[0]}.")
        factor, length = number("factor"), lengths[0]
        fast, slow = (number(name) if name in chosen else default
                      for name, default in (("beta_fast", 32), ("beta_slow", 1)))  # fmt: skip
        if "attention_factor" in chosen:
            scale = number("attention_factor")
        else:
            scale = 0.1 * math.log(max(factor, 1)) + 1
        yarn = fast, slow, length, bool(chosen.get("truncate", True))
        return Rope(theta, factor, yarn=yarn, scale=scale), local
    raise LlmError(
        f"{path}: rope_type must be default, linear, llama3 or yarn (without mscale), got {kind}. "
        "Positions would be wrong without it."
    )


def _windows(family, fields, path):
    """Return the window of each layer."""
    layers, window = fields["num_hidden_layers"], fields.get("sliding_window") or 0
    kinds = fields.get("layer_types")
    if kinds is None:
        every = {"gemma2": 2, "gemma3_text": fields.get("sliding_window_pattern", 6), "gpt_oss": 2}
        every = every.get(family)
        if family in ("mistral", "mixtral", "phi3"):
            local = [window > 0] * layers
        elif every is not None:
            local = [(i + 1) % every != 0 for i in range(layers)]
        else:
            if fields.get("use_sliding_window") and "max_window_layers" not in fields:
                raise LlmError(f"{path}: use_sliding_window of {family} needs layer_types.")
            first = fields.get("max_window_layers", 0)
            local = [bool(fields.get("use_sliding_window")) and i >= first for i in range(layers)]
    else:
        unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
        if unknown or len(kinds) != layers:
            found = ", ".join([str(len(kinds)), *unknown])
            raise LlmError(
                f"{path}: layer_types must have full_attention or sliding_attention for each of "
                f"{layers} layers, got {found}."
            )
        local = [kind == "sliding_attention" for kind in kinds]
    if any(local) and not window:
        raise LlmError(f"{path} must have sliding_window, for the layers that have one.")
    return tuple(window if one else 0 for one in local)
