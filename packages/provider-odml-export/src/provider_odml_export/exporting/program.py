"""The program of one signature: what is sent to the converter, and run in JAX beside it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hijax_trace import Box
from interception_core import OpCall
from provider_odml import Plan
from provider_odml.features import (
    Node,
    Quantize,
    Replay,
    Runtime,
    Site,
    SiteUse,
    is_array,
    is_key,
    split,
)

from ..litert import Program
from .collect import Collected
from .composite import Grid
from .emit import Device
from .float32 import in_float32, widened
from .loops import Handler
from .once import computed_once
from .written_out import WrittenOut

PROBE = "site_"
"""Begins the names of the outputs that are sites."""


@dataclass(frozen=True)
class Exported:
    """One signature, ready for the converter.

    Attributes:
        name: of the signature.
        program: the program, with its loops written out.
        args: its arguments, with the parameters.
        places: which of the leaves of the arguments are inputs.
        grids: by site.
        constants: its constants.
        inputs: the names of the inputs.
        outputs: the names of the results.
    """

    name: str
    program: WrittenOut
    args: tuple
    places: tuple[int, ...]
    grids: Mapping[str, Grid]
    constants: Collected
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def plan(self) -> Plan:
        """The plan, of the program with its loops written out."""
        return self.program.plan

    @property
    def samples(self) -> list[np.ndarray]:
        """The sample data; half precision in float32, as the file has it."""
        leaves = jax.tree.leaves(self.args)
        return [np.asarray(widened(leaves[i])) for i in self.places]

    @functools.cached_property
    def probes(self) -> dict[str, Site]:
        """Where tensors are quantized: by place, the site."""
        found = {}
        for op_id, decision in self.plan.decisions.items():
            for slot, use in decision.inputs.items():
                if isinstance(use, SiteUse):
                    found[f"{op_id}#{slot}"] = self.plan.sites[use.site]
            if decision.output is not None:
                found[op_id] = self.plan.sites[decision.output.site]
        return found

    @functools.cached_property
    def unchanged(self) -> frozenset[str]:
        """The places of operands that have the scale already that they are read at.

        As a skip connection that is concatenated with what has a smaller range: the ranges tell.
        """
        decisions, grids, found = self.plan.decisions, self.grids, set()
        for op_id, decision in decisions.items():
            for use in decision.node.activations:
                read, maker = decision.inputs.get(use.slot), decisions.get(use.tensor or "")
                if not isinstance(read, SiteUse) or maker is None or maker.output is None:
                    continue
                # Steps and branches have a range each, and are joined in float.
                is_plain = not (maker.node.loops or decision.node.loops or decision.node.is_chosen)
                if is_plain and grids[maker.output.site].same(grids[read.site]):
                    found.add(f"{op_id}#{use.slot}")
        return frozenset(found)

    def node_of(self, place: str) -> Node:
        """Return the operation of a place."""
        op_id = place if place in self.plan.decisions else place.rpartition("#")[0]
        return self.plan.decisions[op_id].node

    def shape_of(self, place: str) -> tuple[tuple[int, ...], str]:
        """Return shape and dtype of the tensor at a place."""
        node = self.node_of(place)
        if place in self.plan.decisions:
            return node.shape, node.dtype
        slot = place.rpartition("#")[2]
        use = next(use for use in node.uses if str(use.slot) == slot)
        return use.shape, use.dtype

    def converted(self, probing: bool) -> Program:
        """Return the program for the converter, with sites as outputs if probing."""

        def run(*inputs: Any) -> Any:
            out, sites = in_float32(lambda *i: self._run(i, probing, None), self._types, inputs)
            return (*jax.tree.leaves(out), *sites)

        names = tuple(f"{PROBE}{i}" for i in range(len(self.probes))) if probing else ()
        return self.lowered(run, (*self.outputs, *names))

    def lowered(self, run: Callable[..., Any], outputs: tuple[str, ...]) -> Program:
        """Return a function of the inputs for the converter.

        Args:
            run: the function, of flat inputs and results.
            outputs: a name for each result.
        """
        types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.samples]
        run = computed_once(run, types)
        run.__name__ = self.name.replace(" ", "_")
        exported = jax.export.export(jax.jit(run, keep_unused=True), platforms=["cpu"])(*types)
        return Program(self.name, exported.mlir_module_serialized, self.inputs, outputs)

    def run(self, handler: Handler, inputs: Sequence[Any]) -> Any:
        """Return the program's results for other inputs.

        Args:
            handler: what is done at each operation.
            inputs: the inputs.
        """
        arrays, _ = split((filled(self.args, self.places, inputs), {}))
        return self.program.run(handler, arrays)

    @functools.cached_property
    def alone(self) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
        """What ``replay`` returns where nothing is forced."""
        return self.replay()

    def replay(
        self, forced: Mapping[str, np.ndarray] | None = None
    ) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
        """Run the program in JAX.

        Args:
            forced: by place, what the operations behind it are given instead: LiteRT's values,
                so that each place shows the difference of one operation alone. Places that are
                left out give what is computed there.

        Returns:
            The results, and by place what was computed there.
        """
        given = {place: np.zeros(self.shape_of(place)[0], np.float32) for place in self.probes}
        given |= {k: np.asarray(v, np.float32) for k, v in (forced or {}).items()}
        force = np.array([place in (forced or {}) for place in self.probes], bool)
        out, sites = self._compiled(tuple(self.samples), given, force)
        places = dict(zip(self.probes, map(np.asarray, sites), strict=True))
        return [np.asarray(leaf) for leaf in jax.tree.leaves(out)], places

    @functools.cached_property
    def in_float(self) -> dict[str, np.ndarray]:
        """What the float program computes, by place. Of a loop that stays one, the first step."""

        def on_arrays(*inputs: Any) -> Any:
            probes = _Probes.of(self)
            runtime = _Float(probes)
            self.run(Replay(self.plan, runtime), inputs)
            return probes.values()

        run = jax.jit(lambda inputs: in_float32(on_arrays, self._types, inputs))
        return dict(zip(self.probes, map(np.asarray, run(self.samples)), strict=True))

    @functools.cached_property
    def _compiled(self) -> Any:
        def run(inputs: tuple, given: Any, force: Any) -> Any:
            places = list(given)

            def on_arrays(*arrays: Any) -> Any:
                n = len(self.places)
                values = dict(zip(places, arrays[n:-1], strict=True))
                are = {place: arrays[-1][i] for i, place in enumerate(places)}
                return self._run(arrays[:n], True, (values, are))

            values = [*inputs, *given.values(), force]
            types = [*self._types, *map(jax.typeof, values[len(inputs) :])]
            return in_float32(on_arrays, types, values)

        return jax.jit(run)

    @property
    def _types(self) -> list[jax.ShapeDtypeStruct]:
        leaves = jax.tree.leaves(self.args)
        return [jax.ShapeDtypeStruct(leaves[i].shape, leaves[i].dtype) for i in self.places]

    def _run(self, inputs: tuple, probing: bool, forced: tuple[Any, Any] | None) -> Any:
        probes = _Probes.of(self) if probing else _Probes({}, {})
        runtime = _Probed(self.grids, self.constants, probes, forced, self.unchanged)
        out = self.run(Replay(self.plan, runtime), inputs)
        return out, probes.values()


class _Probes:
    """What is computed at each place: in a loop that stays one, in its first step.

    Args:
        boxes: by place.
        firsts: of places in loops, whether they have not been reached yet, as a float.
    """

    def __init__(self, boxes: Mapping[str, Box], firsts: Mapping[str, Box]):
        self._boxes = boxes
        self._firsts = firsts

    @classmethod
    def of(cls, one: Exported) -> _Probes:
        """Return empty ones."""
        boxes, firsts = {}, {}
        for place in one.probes:
            boxes[place] = Box(jnp.zeros(one.shape_of(place)[0], jnp.float32))
            if one.node_of(place).loops:
                firsts[place] = Box(jnp.float32(1))
        return cls(boxes, firsts)

    def keep(self, where: str, x: jax.Array) -> Any:
        """Keep what is computed at a place. Return whether it was, as a bool or an array."""
        box, first = self._boxes.get(where), self._firsts.get(where)
        if box is None:
            return False
        x = x.astype(jnp.float32)
        if first is None:
            box.set(x)
            return True
        is_first = first.get() > 0.5
        box.set(jnp.where(is_first, x, box.get()))
        first.set(jnp.float32(0))
        return is_first

    def values(self) -> tuple[jax.Array, ...]:
        """Return what was kept, in the order of the places."""
        return tuple(box.get() for box in self._boxes.values())


class _Float(Runtime):
    """Runs in float, and keeps the values where tensors are quantized."""

    def __init__(self, probes: _Probes):
        self._probes = probes

    def activation(
        self, x: jax.Array, use: SiteUse, site: Site, where: str, call: OpCall
    ) -> jax.Array:
        self._probes.keep(where, x)
        return x

    def parameter(self, x: jax.Array, use: Quantize, where: str) -> jax.Array:
        return x


class _Probed(Device):
    """Keeps what is computed at each place."""

    def __init__(
        self,
        grids: Mapping[str, Grid],
        constants: Collected,
        probes: _Probes,
        forced: tuple[Mapping[str, Any], Mapping[str, Any]] | None,
        unchanged: Container[str],
    ):
        super().__init__(grids, constants, forced is None, unchanged)
        self._probes = probes
        self._forced = forced

    def activation(
        self, x: jax.Array, use: SiteUse, site: Site, where: str, call: OpCall
    ) -> jax.Array:
        out = super().activation(x, use, site, where, call)
        kept = self._probes.keep(where, out)
        if self._forced is None or kept is False:
            return out
        given, are = self._forced
        other = given[where].astype(out.dtype).reshape(out.shape)
        return jnp.where(are[where] & kept, other, out)


def filled(args: tuple, places: Sequence[int], inputs: Sequence[Any]) -> Any:
    """Return arguments with other values for their inputs."""
    leaves, treedef = jax.tree.flatten(args)
    for place, value in zip(places, inputs, strict=True):
        leaves[place] = value
    return jax.tree.unflatten(treedef, leaves)


def places_of(args: tuple, argnum: int, keys: bool = False) -> tuple[int, ...]:
    """Return which leaves of the arguments are inputs: arrays that are not parameters.

    Args:
        args: the arguments.
        argnum: which of them holds the parameters.
        keys: whether typed keys of random numbers are inputs; a file has none.
    """
    found, count = [], 0
    for number, arg in enumerate(args):
        for leaf in jax.tree.leaves(arg):
            if number != argnum and is_array(leaf) and (keys or not is_key(leaf)):
                found.append(count)
            count += 1
    return tuple(found)
