"""The primitive ``transposable``: a program whose derivative alone is linear.

JAX transposes the operations that it finds, and drops the rules of ``custom_jvp`` functions before
it does. What a handler makes of a linear operation may round, and has a derivative that does not.
As one equation of this primitive it has a transpose: that of its derivative.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax._src import core  # 0.10.2 - 0.12
from jax._src.interpreters import (
    ad,  # 0.10.2 - 0.12
    batching,  # 0.10.2 - 0.12
)
from jax._src.interpreters import mlir as _mlir  # 0.10.2 - 0.12

from .hijax import instantiate, zeros_like_aval
from .jaxpr import as_function, with_consts
from .pjit import named_info
from .trace import mapped, stage

transposable_p = core.Primitive("transposable")
"""Calls its parameter ``jaxpr``, a closed jaxpr without effects."""
transposable_p.multiple_results = True


@transposable_p.def_impl
def _run(*values: Any, jaxpr: Any) -> list[Any]:
    return as_function(jaxpr)(*values)


# A handler may have made HiPrims, as JAX 0.12 makes of ``custom_jvp`` functions with its flag.
# Nothing transposes a program that is lowered to arrays, so that its equations need no call around.
transposable_p.to_lojax = _run


@transposable_p.def_abstract_eval
def _types(*avals: Any, jaxpr: Any) -> list[Any]:
    return jaxpr.out_avals


def _jvp(primals: Any, tangents: Any, *, jaxpr: Any) -> tuple[list[Any], list[Any]]:
    results = transposable_p.bind(*primals, jaxpr=jaxpr)
    places = [i for i, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]

    def along(*given: Any) -> list[Any]:
        pairs = dict(zip(places, given, strict=True))
        return _run(*(pairs.get(i, x) for i, x in enumerate(primals)), jaxpr=jaxpr)

    given = [primals[i] for i in places], [tangents[i] for i in places]
    return results, jax.jvp(along, *given)[1]


def _transpose(cts: Sequence[Any], *values: Any, jaxpr: Any) -> list[Any]:
    places = [i for i, value in enumerate(values) if ad.is_undefined_primal(value)]

    def along(*given: Any) -> list[Any]:
        pairs = dict(zip(places, given, strict=True))
        return _run(*(pairs.get(i, x) for i, x in enumerate(values)), jaxpr=jaxpr)

    # The derivative of a linear function is the same everywhere.
    zeros = [zeros_like_aval(values[i].aval) for i in places]
    found = jax.vjp(along, *zeros)[1](list(map(instantiate, cts)))
    pairs = dict(zip(places, found, strict=True))
    return [pairs.get(i) for i in range(len(values))]


def _batch(axis: Any, values: Any, dims: Any, *, jaxpr: Any) -> tuple[list[Any], list[Any]]:
    if all(dim is None for dim in dims):
        results = transposable_p.bind(*values, jaxpr=jaxpr)
        return results, [None] * len(results)
    # JAX's rules compute some axes with NumPy, whose integers are not ints.
    axes = [None if dim is None else int(dim) for dim in dims]
    whole = mapped(as_function(jaxpr), axis, tuple(axes), 0)
    batched = with_consts(*stage(whole, list(map(core.typeof, values)), named_info("transposable")))
    return transposable_p.bind(*values, jaxpr=batched), [0] * len(jaxpr.out_avals)


ad.primitive_jvps[transposable_p] = _jvp
ad.primitive_transposes[transposable_p] = _transpose
batching.fancy_primitive_batchers[transposable_p] = _batch
_mlir.register_lowering(transposable_p, _mlir.lower_fun(_run, multiple_results=True))
