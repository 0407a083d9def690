"""Matching: which operands are weights, which rule decides about an operation, and its tiles."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import interegular

import quant_numerics as qn
from interception_core import Engine, OpCall, ValueKind
from quant_numerics import Contraction

from ..rules.rule import NAMED_ONLY, QuantizationRule, is_fused
from .facts import Code, Fact

Axes = tuple[int | tuple[int, ...] | None, ...]
"""For each axis of a parameter, the axis of the operand that it became: see ``Operand.axes``."""

_SEPARATOR = "/"
# "(a|b)*a(a|b){n}" has 2**n states: 0.1 s of work for 8 repeats, half a minute for 12.
_COUNTED = re.compile(r"\{(?:\d*,)?(\d+),?\}")
_MOST_REPEATS = 8
_LONGEST = 500


class PathKeys:
    """Map module paths to keys; equal keys match the same patterns.

    A jitted function that is called under two paths may share one trace if no rule can ever treat
    the two apart: not there, and not under any name scope that the function opens inside. For a
    regular expression that is a question about its finite automaton: both paths must lead to the
    same state (Myhill and Nerode).

    Args:
        patterns: regular expressions that are matched with whole paths.
    """

    def __init__(self, patterns: Iterable[str]):
        automata = [_automaton(pattern) for pattern in patterns]
        known = [automaton for automaton in automata if automaton is not None]
        # If a pattern has no automaton (it has a back reference, say), each path is its own key.
        self._automata = known if len(known) == len(automata) else None
        self._key = functools.lru_cache(maxsize=None)(self._find_key)

    def __call__(self, path: str) -> Hashable:
        """Return the key of ``path``."""
        return self._key(path)

    def _find_key(self, path: str) -> Hashable:
        if self._automata is None:
            return path
        return tuple(_state(automaton, path) for automaton in self._automata)


def _automaton(pattern: str) -> interegular.FSM | None:
    """Return ``pattern``'s smallest automaton; None without a small one."""
    repeats = math.prod(map(int, _COUNTED.findall(pattern)))
    if len(pattern) > _LONGEST or repeats > _MOST_REPEATS:
        return None
    try:
        return interegular.parse_pattern(pattern).to_fsm().reduce()
    except (interegular.Unsupported, interegular.InvalidSyntax):
        return None


def _state(automaton: interegular.FSM, path: str) -> tuple[bool, Any]:
    """Return whether ``path`` matches, and the state for paths below."""
    state = _follow(automaton, automaton.initial, path)
    below = _follow(automaton, state, _SEPARATOR) if path else state
    return state in automaton.finals, below


def _follow(automaton: interegular.FSM, state: Any, text: str) -> Any:
    """Return the state after ``text``; None if nothing can match."""
    for character in text:
        if state is None:
            return None
        moves: Any = automaton.map.get(state, {})
        state = moves.get(automaton.alphabet[character])
    return state if state is None or automaton.islive(state) else None


def follows_values(engine: Engine) -> bool:
    """Return whether an engine follows values through a program.

    One that does knows views and derived weights, sees lookups as primitives with JIT on, and
    hands stored parameters to the operations that use them.
    """
    return bool(getattr(engine, "follows_values", False))


@dataclass(frozen=True)
class Weight:
    """An operand that is a parameter, a view, or a derived weight.

    Attributes:
        paths: the pytree paths of the parameters behind it.
        shape: of the operand.
        dtype: of the operand.
        axes: for each axis of the parameter, the axis of the operand that it became; None unless
            the operand is one whole parameter, or a step of it, with its axes in another order.
        is_dynamic: whether the program computes which part of the parameters it is.
        is_adapted: whether a parameter behind it has an adapter in this call.
    """

    paths: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: Any
    axes: Axes | None
    is_dynamic: bool = False
    is_adapted: bool = False


@dataclass(frozen=True)
class Weights:
    """The weights among the operands of an operation.

    Attributes:
        found: the weight that each operand is; None for activations.
        is_part: whether all operands are weights: the result is a weight, or a part of one.
        beside: the paths of parameters of which activations are moved, as rows of a table.
    """

    found: tuple[Weight | None, ...]
    is_part: bool = False
    beside: tuple[str, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        """The pytree paths of the parameters behind them."""
        return tuple(path for weight in self.found if weight for path in weight.paths)


def weights_among(
    call: OpCall,
    operands: Sequence[Any],
    is_parameter: Callable[[str], bool],
    adapted: Set[str] = frozenset(),
) -> Weights:
    """Return which operands of a matmul or convolution are weights.

    An array that the program closes over may be data or a mask. So if both operands come from
    parameters and one of them uses such an array, the other one is the weight. A part that a
    computed index picks is an activation beside a weight (a row of an embedding table), and a
    weight beside an activation (an expert). So is a loop's state that starts as a parameter, but a
    product of two such states is a part of a weight (a power of a matrix).
    """
    kinds: dict[int, ValueKind] = {}
    found: list[Weight | None] = [None] * len(operands)
    for i, operand in enumerate(operands):
        if call.is_activation(operand, is_parameter):
            continue
        known = call.operand(operand)
        path = known.provenance
        if path is not None:
            if not is_parameter(path):
                continue
            kind = ValueKind("view", False, frozenset([path]))
        else:
            kind = call.kind(operand, is_parameter)
            if kind is None or kind.kind not in ("view", "derived"):
                continue
        if known.shape is None:
            continue
        kinds[i] = kind
        paths, is_adapted = tuple(sorted(kind.paths)), not adapted.isdisjoint(kind.paths)
        found[i] = Weight(paths, known.shape, known.dtype, known.axes, kind.is_dynamic, is_adapted)
    if len(kinds) < 2:
        return Weights(tuple(found))
    static = [i for i, kind in kinds.items() if not kind.is_dynamic]
    own = [i for i in static if not kinds[i].closes_over]
    # Where both use such an array, it masks a weight in both.
    are_alike = len(static) == len(kinds) and len(own) != 1
    if are_alike or not any(kind.is_known for kind in kinds.values()):
        return Weights(tuple(found), is_part=True)
    kept = own if len(own) == 1 else static if len(static) == 1 else []
    beside = {path for i, kind in kinds.items() if i not in kept for path in kind.paths}
    weights = tuple(one if i in kept else None for i, one in enumerate(found))
    return Weights(weights, beside=tuple(sorted(beside)))


class Decision(NamedTuple):
    """What a rule says about a contraction.

    Attributes:
        hows: how each operand is quantized; None where it stays float.
        remarks: what is done that the rule does not say.
        why: why the operation stays float; None if it does not.
        wrong: whether its rule forbids that.
    """

    hows: tuple[qn.HowToQuantize | None, ...]
    remarks: tuple[Fact, ...]
    why: Fact | None
    wrong: bool


@dataclass(frozen=True)
class Under:
    """Recognize parameters among inputs by a common pytree path prefix."""

    prefix: str

    def __call__(self, path: str) -> bool:
        """Return whether the path is that of a parameter."""
        return path.startswith(self.prefix)


@dataclass(frozen=True)
class Rules:
    """Rules in their order, and which argument holds the parameters.

    Attributes:
        rules: the first match counts.
        params: what the pytree path of every parameter begins with, such as ``args[0]``.
        adapted: paths of the parameters that have an adapter in this call.
    """

    rules: tuple[QuantizationRule, ...]
    params: str
    adapted: frozenset[str] = frozenset()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rules, self.params, self.adapted)  # without what is cached

    @functools.cached_property
    def find(self) -> Callable[..., int | None]:
        """Returns the number of the rule for an operation.

        It takes the operation's names, its module path, what ``paths`` returned of its parameters,
        and whether it has a weight.
        """
        return functools.lru_cache(maxsize=None)(self._find)

    @functools.cached_property
    def is_parameter(self) -> Under:
        """Returns whether the input of a path is a parameter."""
        return Under(self.params)

    @functools.cached_property
    def origin_key(self) -> Callable[[str], Hashable]:
        """Maps the path of an input to a key; equal keys mean that no rule tells inputs apart."""
        return functools.lru_cache(maxsize=None)(self._origin_key)

    def _find(
        self,
        names: tuple[str, ...],
        module_path: str,
        paths: tuple[str, ...] = (),
        has_weight: bool | None = True,
    ) -> int | None:
        for i, rule in enumerate(self.rules):
            if any(rule.matches(n, module_path, paths, has_weight=has_weight) for n in names):
                return i
        return None

    def _origin_key(self, path: str) -> Hashable:
        if not path.startswith(self.params):
            return None
        below = (path.removeprefix(self.params),)
        # Parameters are alike if the same rules match them, apart from the paths in these.
        left = (rule for rule in self.rules if rule.matches_weight(below))
        same = dict.fromkeys(dataclasses.replace(rule, weight_path=None) for rule in left)
        return path in self.adapted, tuple(same)

    @functools.cached_property
    def _by_weight(self) -> bool:
        return any(rule.weight_path is not None for rule in self.rules)

    @property
    def argnum(self) -> int:
        """Return the position of the argument that holds the parameters."""
        return int(self.params.removeprefix("args[").removesuffix("]"))

    def weights(self, call: OpCall, operands: Sequence[Any]) -> Weights:
        """Return which operands of an operation are weights."""
        return weights_among(call, operands, self.is_parameter, self.adapted)

    def paths(self, weights: Weights) -> tuple[str, ...]:
        """Return paths of parameters for ``find``, if a rule needs them."""
        if not self._by_weight:
            return ()
        return self.below(weights.paths)

    def below(self, paths: Iterable[str]) -> tuple[str, ...]:
        """Return paths as rules name parameters: below the argument that holds them."""
        return tuple(path.removeprefix(self.params) for path in paths)

    def how(self, rule: QuantizationRule, is_weight: bool) -> qn.HowToQuantize | None:
        """Return how a rule quantizes an operand."""
        qtype = rule.weight_qtype if is_weight else rule.act_qtype
        if qtype is None:
            return None
        method = rule.weight_calibration_method if is_weight else rule.act_method
        tile = rule.tile_size if rule.tile_size is not None else qn.get_qtype(qtype).block
        channelwise = not getattr(rule, "disable_channelwise_axes", False)
        scales = rule.scale_dtype if is_weight else None
        return qn.HowToQuantize(qtype, tile, method, channelwise, scales)

    def decide(
        self, index: int, contraction: Contraction, operands: Sequence[Any], sides: Sequence[bool]
    ) -> Decision:
        """Return what a rule says; ``sides`` tell which operands are weights."""
        rule = self.rules[index]
        shapes = [operand.shape for operand in operands]
        hows = tuple(self.how(rule, is_weight) for is_weight in sides)
        sizes = contraction.tiled_sizes(shapes, hows)
        hows, remarks = all_fitted(sizes, rule.tile_fallback, hows)
        if all(hows) and not any(sides):
            remarks = (*remarks, Code.OF_ACTIVATIONS())
        why, wrong = None, False
        # A parameter that stays float may still have an adapter.
        if any(hows) or not rule.adapts or not any(sides):
            sizes = contraction.tiled_sizes(shapes, hows) if any(hows) else ()
            why, wrong = _why_not(rule, sizes, hows)
        return Decision(hows, remarks, why, wrong)

    @property
    def adapts(self) -> bool:
        """Return whether any parameter may have an adapter."""
        return any(rule.adapts for rule in self.rules)

    @property
    def names_operations(self) -> bool:
        """Return whether any rule names contractions."""
        named = (name for rule in self.rules for name in rule.op_names or ())
        return any(name not in NAMED_ONLY and not is_fused(name) for name in named)

    @property
    def looks_up(self) -> bool:
        """Return whether any rule names lookups."""
        return any("take" in (rule.op_names or ()) for rule in self.rules)

    @property
    def is_static(self) -> bool:
        """Return whether anything has a static range."""
        return any(rule.is_static for rule in self.rules)


def _why_not(
    rule: QuantizationRule,
    sizes: Sequence[int],
    hows: Sequence[Any],
) -> tuple[Fact | None, bool]:
    """Return why an operation stays float, and if its rule forbids that."""
    if not any(hows):
        if rule.weight_qtype is None and not rule.adapts:
            return Code.LEFT_FLOAT(), False
        return Code.NO_WEIGHT(), False
    reasons = (misfit(sizes, how, rule.tile_fallback) for how in hows)
    reason = next(filter(None, reasons), None)
    return reason, reason is not None


def tile_elements(tile_size: int | float, size: int) -> int:
    """Return how many elements a rule's tile has: a float is one over the number of tiles."""
    return round(tile_size * size) if isinstance(tile_size, float) else tile_size


def tiles_of(sizes: Sequence[int], tile_size: int | float) -> dict[int, int] | None:
    """Return how contracted axes of these sizes are tiled; see ``qn.contraction_tiles``."""
    tile = tile_elements(tile_size, math.prod(sizes))
    return qn.contraction_tiles(sizes, range(len(sizes)), tile) if tile > 0 else None


def misfit(
    sizes: Sequence[int], how: qn.HowToQuantize | None, fallback: str | None = None
) -> Fact | None:
    """Return why a contraction cannot have an operand's tiles, or None.

    ``sizes`` are of the contracted axes, the last of which changes fastest. With the fallback
    "padded" the last tile may be shorter.
    """
    if how is None or how.tile_size is None:
        return None
    tile_size, nowhere, uneven = how.tile_size, Code.NO_TILES, Code.MISFIT
    about: dict[str, Any] = {"tile": tile_size}
    if qn.get_qtype(how.qtype).block is not None:
        nowhere, uneven, about["qtype"] = Code.NO_BLOCKS_HERE, Code.BLOCK_MISFIT, how.qtype
    if not sizes:
        return nowhere(**about)
    tiles = tiles_of(sizes, tile_size)
    even = tiles is not None and not any(sizes[axis] % tile for axis, tile in tiles.items())
    if even or (tiles is not None and fallback == "padded" and not isinstance(tile_size, float)):
        return None
    return uneven(**about, sizes=tuple(sizes))


FALLBACKS = ("divisor", "channel", "padded")
"""What a rule's ``tile_fallback`` may be, besides None."""


def remedies(sizes: Sequence[int], hows: Sequence[qn.HowToQuantize | None]) -> tuple[str, ...]:
    """Return what a rule may have instead of tiles that don't divide contracted axes."""

    def helps(fallback: str) -> bool:
        found, _ = all_fitted(sizes, fallback, tuple(hows))
        return not any(misfit(sizes, how, fallback) for how in found)

    found = [f"tile_fallback={name!r}" for name in FALLBACKS if helps(name)]
    if any(how and qn.get_qtype(how.qtype).block is not None for how in hows):
        found.append("a format without blocks, such as 'int8' or 'int4'")
    else:
        found.append("another tile_size")
    return tuple(found)


def fitted(
    how: qn.HowToQuantize, sizes: Sequence[int], fallback: str | None
) -> tuple[qn.HowToQuantize, Fact | None]:
    """Return an operand's quantization with tiles that fit, and what is done instead of the rule.

    ``sizes`` are of the contracted axes, empty where it can have no tiles.
    """
    tile, why = how.tile_size, misfit(sizes, how)
    if tile is None or why is None or fallback is None:
        return how, None
    if misfit(sizes, how, fallback) is None:
        return how, Code.SHORTER_TILE(why=why)
    if qn.get_qtype(how.qtype).block is not None:
        return how, None
    total = math.prod(sizes)
    most = min(tile_elements(tile, total), total) if sizes and fallback != "channel" else 0
    tried = (dataclasses.replace(how, tile_size=n) for n in range(most, 1, -1))
    found = next((one.tile_size for one in tried if misfit(sizes, one) is None), None)
    found = None if found == total else found
    done = Code.PER_CHANNEL(why=why) if found is None else Code.OTHER_TILES(why=why, tile=found)
    return dataclasses.replace(how, tile_size=found), done


def all_fitted(
    sizes: Sequence[int],
    fallback: str | None,
    hows: tuple[qn.HowToQuantize | None, ...],
) -> tuple[tuple[qn.HowToQuantize | None, ...], tuple[Fact, ...]]:
    """Return how operands are quantized, with tiles that fit, and what is done instead."""
    tiled = [how for how in hows if how]
    found = {how: fitted(how, sizes, fallback) for how in tiled}
    # Both sides have the same tiles, those of a format with blocks.
    blocks = any(qn.get_qtype(how.qtype).block is not None for how in tiled)
    if blocks and any(new is not how for how, (new, _) in found.items()):
        return hows, ()
    remarks = tuple(dict.fromkeys(done for _, done in found.values() if done))
    return tuple(how and found[how][0] for how in hows), remarks
