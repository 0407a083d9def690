"""What a decoder is."""

from __future__ import annotations

import dataclasses
import functools

from interception_core import JaxtapError

from .kinds import Kind, Stack, segments_of
from .ropes import Rope


class LlmError(JaxtapError):
    """Something that the user gave can't be used. The message says what to do."""


@dataclasses.dataclass(frozen=True)
class Delta:
    """Layers of a gated delta rule (Yang et al. 2024, arXiv:2412.06464), as Qwen 3.5 has them.

    Attributes:
        keys: heads of queries and keys; ``values`` is a multiple of it.
        values: heads of values, each with a state of ``[key_size, value_size]``.
        key_size: of a head of queries or keys; ``value_size`` of one of values.
        taps: of the convolution along positions.
    """

    keys: int
    values: int
    key_size: int
    value_size: int
    taps: int

    @property
    def width(self) -> int:
        """Numbers of a position that the convolution sees: queries, keys and values."""
        return 2 * self.keys * self.key_size + self.values * self.value_size


@dataclasses.dataclass(frozen=True)
class Config:
    """A decoder. Hashable, so that it can be a static argument.

    Attributes:
        family: ``model_type`` of the file.
        windows: of each layer, the last positions that a query sees; 0 for all. With ``chunked``,
            those of the query's chunk of so many (Llama 4).
        ropes: rotary positions, and ``rope_of`` each layer's place among them.
        scale: of the scores.
        softcap: of the scores (Gemma 2), 0 for none; ``final_softcap`` of the logits.
        experts: 0 for a dense model; ``inner`` is the width of one expert then.
        biased: the projections that have a bias.
        sinks: whether each head has a score that no position has.
        limit: of what an expert's gate multiplies (gpt-oss); 0 for none.
        gemma: norms also behind attention and MLP, gelu, scaled embeddings.
        kinds: of each layer, where they differ; none where all have the parameters that the fields
            of ``Kind``, which this class has too, say.
        shared_inner: width of the MLP that all tokens go through beside the experts; 0 for none.
        mixer: ``"attention"``, or ``"delta"`` for a gated delta rule.
        local: whether the layer is one of those with windows (Gemma 4).
        keeps: whether a layer has keys and values. Where not, it attends to those of the last
            layer before that has some and is as ``local``.
        has_values: whether it has a projection of values. Where not, they are the keys.
        delta: of the layers with that mixer.
        shifted: the files have norms' scales less 1.
        interleaved: rotary pairs are neighbours, not halves of a head.
        unit_norms: queries and keys that turn have a root mean square of 1.
        value_norms: values have one.
        tempering: of queries without positions (floor_scale, attn_scale of Llama 4); None for none.
        gated: queries come with gates of what attention returns.
        sigmoid_router: experts see their inputs times a sigmoid of the score (Llama 4).
        gated_shared: the shared MLP has a gate for each token.
        parallel: experts and the MLP see what attention left, each by its own norms (Gemma 4).
        layer_input: width of what each layer gets of the token (Gemma 4's per-layer embeddings).
        layer_vocabulary: rows of the table of those.
        layer_scales: whether what a layer returns is scaled.
        cache_end: of the names of the arrays of the cache that the layers of a view have.
        prefix: of the names of tensors, in folders with an image encoder too.
        layout: of experts in files, as ``Family.experts`` has it.
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
    kinds: tuple[Kind, ...] = ()
    shared_inner: int = 0
    mixer: str = "attention"
    local: bool = False
    keeps: bool = True
    has_values: bool = True
    delta: Delta | None = None
    shifted: bool = False
    interleaved: bool = False
    chunked: bool = False
    unit_norms: bool = False
    value_norms: bool = False
    tempering: tuple[float, float] | None = None
    gated: bool = False
    sigmoid_router: bool = False
    gated_shared: bool = False
    parallel: bool = False
    layer_input: int = 0
    layer_vocabulary: int = 0
    layer_scales: bool = False
    cache_end: str = ""
    prefix: str = "model."
    layout: str = "each"

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.windows)

    @property
    def projected_heads(self) -> list[int]:
        """How many heads each of the projections of attention has, with their gates.

        Queries, keys and values; a layer that attends to another's keys projects queries alone, and
        one whose values are its keys has no third.
        """
        heads = [self.heads * (2 if self.gated else 1), self.kv_heads, self.kv_heads]
        return heads[: 1 if not self.keeps else 3 if self.has_values else 2]

    @functools.cached_property
    def segments(self) -> tuple[tuple[Stack, ...], ...]:
        """The stacks of layers that a program runs in turn: see ``segments_of``."""
        return segments_of(self.kinds, self.layers)

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """All stacks of layers."""
        return tuple(stack for segment in self.segments for stack in segment)

    def view(self, stack: Stack | int) -> Config:
        """Return the config of the layers of a stack, or of one layer, which are all alike."""
        at = (stack,) if isinstance(stack, int) else stack.layers
        fields = {
            name: tuple(getattr(self, name)[i] for i in at) for name in ("windows", "rope_of")
        }
        kind = vars(self.kinds[at[0]]) if self.kinds else {}
        source = self.source(at[0])
        end = next(end for end, layers in self.cached.items() if source in layers)
        return dataclasses.replace(self, kinds=(), cache_end=end, **fields, **kind)

    @functools.cached_property
    def cached(self) -> dict[str, tuple[int, ...]]:
        """The layers that are together in arrays of a cache, by the end of these arrays' names."""
        if not self.kinds:
            return {"" if self.mixer == "attention" else self.mixer: tuple(range(self.layers))}
        found: dict[tuple[int, int] | str, list[int]] = {}
        for i, kind in enumerate(self.kinds):
            if kind.keeps or kind.mixer != "attention":
                heads = kind.kv_heads, kind.head_size
                found.setdefault(heads if kind.mixer == "attention" else kind.mixer, []).append(i)
        heads = [key for key in found if not isinstance(key, str)]
        return {
            key if isinstance(key, str) else str(heads.index(key) or ""): tuple(layers)
            for key, layers in found.items()
        }

    def place(self, layer: int) -> tuple[Stack, int]:
        """Return the stack that has a layer, and its place there."""
        stack = next(one for one in self.stacks if layer in one.layers)
        return stack, stack.layers.index(layer)

    def source(self, layer: int) -> int:
        """Return the layer whose keys and values a layer attends to: itself, or one before."""
        if not self.kinds or self.kinds[layer].keeps:
            return layer
        local = self.kinds[layer].local
        before = [i for i in range(layer) if self.kinds[i].keeps and self.kinds[i].local == local]
        return before[-1]
