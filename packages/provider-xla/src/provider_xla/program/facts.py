"""Facts: what a plan knows of operations and parameters, as data, and its text.

Logic compares codes and reads subjects and values. Only this module makes sentences of them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@enum.unique
class Code(enum.Enum):
    """What a fact says; call one with subjects and values for the fact.

    A code's value is its text, with the names of subjects and values in braces.
    """

    # Why an operation, or its activations, stay float: rules.
    NO_RULE = "no rule matches"
    NO_WEIGHT = "the rule is for weights, and no operand is known as a parameter"
    LEFT_FLOAT = "the rule leaves it float"
    LEFT_TO_XLA = "the rule leaves it to XLA"
    NOT_NAMED = "no rule names it"
    NO_TILES = (
        "tile_size {tile} is for matmuls (1x1 convolutions, too), and convolutions of float inputs"
    )
    NO_BLOCKS_HERE = (
        "the block of {qtype}, {tile}, is for matmuls (1x1 convolutions, too), and convolutions of "
        "float inputs"
    )
    MISFIT = "tile_size {tile} does not divide contracted [{sizes:, }]"
    BLOCK_MISFIT = "the block of {qtype}, {tile}, does not divide contracted [{sizes:, }]"
    UNFIT = ("{why}. Give the rule {others: or }, or leave the operation float by a rule of its "
             "own")  # fmt: skip
    # What the program does.
    COMPUTES_WEIGHT = "all operands come from parameters: it computes a weight, or a part of one"
    UNREAD_WEIGHT = (
        "it computes a weight of parameters alone, at each call, and no operation that is "
        "quantized reads it. Give it a rule without weight_qtype if that is meant"
    )
    MADE_AT_CALLS = (
        "it is made of {paths} at each call, since an operation before it is quantized, for which "
        "a constant is data. Give that one a rule without weight_qtype, and this weight is stored"
    )
    BESIDE_WEIGHT = "it is an activation there, beside a weight"
    LINEAR = "JAX transposes it, so that it must be linear: its activations stay float"
    SCALED = ("{paths} can't be stored: the program multiplies or joins it with what it computes "
              "at each call")  # fmt: skip
    STATE = "{paths} can't be stored: the program writes into it at each call, as into a cache"
    COUNTED = "a loop counts the index: it takes the rows in turn"
    PALLAS = "it is used inside a Pallas kernel, which stays as it is written"
    OPAQUE = (
        "it is a primitive of a library and holds programs, in which nothing is quantized. Give "
        "the parameter a rule without weight_qtype, or write this part of the program with JAX's "
        "functions"
    )
    UNFOLLOWED = (
        "no operand is known as a parameter: the program or a library transforms it in a trace of "
        "its own. Where that is a derivative of a shard_map, put jax.jit around the shard_map"
    )
    # How its call is read.
    INTERLEAVED = "the interleaved form is seen in its parts"
    SEVERAL_OPERANDS = "{count} operands are seen in their parts"
    OWN_DOT_GENERAL = "it is computed by a dot_general of the program's own"
    DIAGONAL = "an operand must have no label twice: in parts"
    SUMMED_FIRST = "a label of one operand alone is summed first: in parts"
    NO_ARRAY = "an operand is a {type}"
    NO_FLOAT = "an operand is {dtype}"
    SCALAR = "an operand is a scalar"
    READ = "{text}"

    # What is done that no rule says.
    OF_ACTIVATIONS = ("XLA quantizes two activations at each call: on CPUs that often takes longer "
                      "than their float product")  # fmt: skip
    SHORTER_TILE = "{why}: a shorter last tile"
    OTHER_TILES = "{why}: tiles of {tile}"
    PER_CHANNEL = "{why}: one scale per channel"
    DONE = "{op_id}: {what}"
    LOST_TILES = ("{op_id}: tiles of {tile} can't be followed back to {paths}: one scale per "
                  "channel")  # fmt: skip
    STAYS_CAST = ("{paths} stays {dtype}, as it is: {op_id} casts it and quantizes the cast at "
                  "each call")  # fmt: skip
    WIDE_SCALES = "{paths}: scales beyond normal float16: float32 scales"
    BESIDE = "{paths}: stored beside {derived:, }, which other calls may compute otherwise"

    # Where rules can't be followed.
    STAYS_FLOAT = "{op_id}{of} stays float: {why} (rule {rule})"
    IN_PART = "{op_id}{of}: {why} (rule {rule})"
    QUANTIZED_AT_CALLS = (
        "{op_id}: its weight {weight} can't be stored (rule {rule}): the loops that it is computed "
        "in step through several parameters, or the program joins, masks or carries parts of "
        "parameters that it chooses while it runs, or devices exchange parts. It is made of "
        "{paths} and quantized at each call"
    )
    SEVERAL_FORMS = (
        "{op_id}: its weight {weight} is chosen among {paths:, }, which are stored in several "
        "forms (rule {rule}): {why}. It is quantized at each call"
    )
    TWO_FORMATS = (
        "{paths} is ambiguous: rule {rule} quantizes it to {qtype} for {op_id}, rule {other_rule} "
        "to {other_qtype} for {other_op}; the first counts"
    )
    NO_BLOCKS = (
        "{paths} stays an array: {qtype} needs tiles of {block} along axes that all of its uses "
        "contract ({ops:, })"
    )
    NO_COMMON_AXIS = ("{paths} stays dense, against sparsity={sparsity!r} of rule {rule}: its uses "
                      "contract no common axis ({ops:, })")  # fmt: skip
    NOT_SPARSE = ("{paths} stays dense, against sparsity={sparsity!r} of rule {rule}: {m} does not "
                  "divide {size}")  # fmt: skip
    TWO_ADAPTERS = (
        "{paths} is ambiguous: rule {rule} gives it an adapter of {adapter} for {op_id}, rule "
        "{other_rule} one of {other_adapter}, or with other fields, for {other_op}; the first "
        "counts"
    )
    NOT_ADAPTED = (
        "{paths} {get} no adapter from {op_id} (rule {rule}): its weight {weight} is computed from "
        "it, and an adapter is for a parameter, a part of one, or an arrangement of it"
    )
    AXES_LOST = ("{paths} {get} no adapter from {op_id} (rule {rule}): its axes can't be followed "
                 "to the operand {weight}")  # fmt: skip
    NOTHING_STORED = (
        "no parameter is stored: {op_id} multiplies arrays of which none is known as a parameter. "
        "Pass what the function closes over among its parameters"
    )
    UNUSED = "rule {rule} has no effect: {shown}: {why}"
    NO_CACHE = "no array matches {cache_rule}"
    CACHE_FLOAT = "{cache}"

    def __call__(
        self,
        *,
        op_id: str | None = None,
        paths: Iterable[str] = (),
        rule: int | None = None,
        **values: Any,
    ) -> Fact:
        """Return the fact of these subjects and values."""
        return Fact(self, op_id, tuple(paths), rule, tuple(values.items()))


IN_PARTS = frozenset(
    {Code.INTERLEAVED, Code.SEVERAL_OPERANDS, Code.OWN_DOT_GENERAL, Code.DIAGONAL,
     Code.SUMMED_FIRST}
)  # fmt: skip
"""An operation stays float as a whole; those that it consists of are looked at."""


@dataclass(frozen=True)
class Fact:
    """What is known of operations and parameters. ``str(fact)`` is a sentence for people.

    Attributes:
        code: what it says.
        op_id: the operation that it is about.
        paths: pytree paths of the parameters that it is about.
        rule: the number of the rule that it is about.
        values: the numbers and names in its text, by name.
    """

    code: Code
    op_id: str | None = None
    paths: tuple[str, ...] = ()
    rule: int | None = None
    values: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        values = {name: _Listed(one) if isinstance(one, tuple) else one
                  for name, one in self.values}  # fmt: skip
        paths = _Listed(self.paths)
        return self.code.value.format(
            op_id=self.op_id,
            paths=paths,
            of=f" of {paths}" if paths else "",
            get="get" if len(paths) > 1 else "gets",
            rule=self.rule,
            **values,
        )


class _Listed(tuple):
    """Names or numbers, which a text lists with its separator, or with "and"."""

    def __format__(self, separator: str) -> str:
        return joined(self, separator or " and ")


def joined(names: Iterable[Any], separator: str = " and ") -> str:
    """Return names, such as paths, as people read them."""
    return separator.join(map(str, names))
