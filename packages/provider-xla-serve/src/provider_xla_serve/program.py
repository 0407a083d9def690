"""ExportedProgram: a program that was lowered ahead, its file, and the parameters it takes."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.export

import quant_numerics as qn
from hijax_trace import Carrier
from interception_core import hide_frames, platform_of
from provider_xla import AdaptedWeight, StoreError
from provider_xla.features import (
    is_adapted,
    is_kept,
    pack,
    packed_type,
    packing_of,
)
from provider_xla.file_formats import atomic_write, damaged

from .kernels import KernelOf, called_in, import_nodes, register

hide_frames(Path(__file__).parent)

_MAGIC = b"jaxtap program 1\n"
_DIGEST = hashlib.sha256().digest_size


@dataclasses.dataclass(frozen=True)
class ExportedProgram:
    """A program of ``plan.export``, called with the arguments it was exported for.

    Attributes:
        exported: what ``jax.export`` made: shapes, platforms and the lowered program.
        kernels: the package of each kernel that it calls, by target.
    """

    exported: jax.export.Exported
    kernels: Mapping[str, KernelOf]

    @classmethod
    def of(cls, exported: jax.export.Exported) -> ExportedProgram:
        """Return the program that ``jax.export`` made, with the kernels that it calls."""
        return cls(exported, called_in(exported))

    def __call__(self, *args: Any) -> Any:
        """Run it; the first call with new shapes compiles it.

        Raises:
            StoreError: it was exported for other platforms than this process runs on.
            ValueError, TypeError: the arguments differ from those that it was exported for.
        """
        return self._jitted(*args)

    def parameters(self, stored: Any) -> Any:
        """Return stored parameters in the form that the program takes.

        A process that serves needs neither the plan nor the function: what ``load(path)`` returns
        without a plan is packed here for the kernels that the program calls.

        Args:
            stored: the parameters, packed or not.

        Raises:
            StoreError: they differ from those that it was exported for, or it has them inside.
        """
        avals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.exported.in_avals]
        args, _ = jax.tree.unflatten(self.exported.in_tree, avals)
        if not args:
            raise StoreError("The program must take parameters, got one that has them inside.")
        return fitted(stored, args[0])

    def compile(self, *args: Any) -> jax.stages.Compiled:
        """Compile for the arguments' shapes and warm kernels up, without running.

        Args:
            args: arrays or ``jax.ShapeDtypeStruct``.

        Returns:
            The compiled program, to be called instead of this one.
        """
        return self._jitted.lower(*args).compile()

    @functools.cached_property
    def _jitted(self) -> Any:
        here, wanted = platform_of(), self.exported.platforms
        if here not in wanted:
            raise StoreError(
                f"The program must be exported for {here}, which this process runs on, got one for "
                f"{', '.join(wanted)}. Export it with platforms={(*wanted, here)!r}."
            )
        return jax.jit(self.exported.call)

    def serialize(self) -> bytes:
        """Return it as bytes, which ``load_exported`` reads.

        Raises:
            StoreError: the arguments or results have nodes that can't be written.
        """
        try:
            program = bytes(self.exported.serialize())
        except ValueError as error:
            raise StoreError(
                f"The arguments and results of a program must be trees that jax.export can write: "
                f"{error} Or export with inside=True, where the parameters are not an argument."
            ) from error
        kernels = {name: dataclasses.asdict(kernel) for name, kernel in self.kernels.items()}
        header = json.dumps({"kernels": kernels, "jax": jax.__version__}).encode()
        body = len(header).to_bytes(8, "little") + header + program
        return _MAGIC + hashlib.sha256(body).digest() + body

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write to a file, which is there whole or not at all.

        Args:
            path: of the file.
            overwrite: whether to replace what is there.

        Raises:
            StoreError: ``path`` exists; or as ``serialize``.
        """
        text = self.serialize()
        with atomic_write(Path(path), overwrite) as new:
            new.write_bytes(text)

    def __str__(self) -> str:
        lines = [f"program for {', '.join(self.exported.platforms)}: {self.exported.fun_name}"]
        lines += [f"  takes {_types(self.exported.in_avals)}"]
        lines += [f"  returns {_types(self.exported.out_avals)}"]
        packages = sorted({(one.package, one.version) for one in self.kernels.values()})
        for name, version in packages:
            targets = [t for t, one in self.kernels.items() if one.package == name]
            lines.append(f"  calls {', '.join(sorted(targets))} of {name} {version}")
        return "\n".join(lines)


def load_exported(
    source: str | os.PathLike[str] | bytes, *, check_versions: bool = True
) -> ExportedProgram:
    """Load a program of ``plan.export`` and register its kernels.

    Args:
        source: the file, or the bytes of ``serialize``.
        check_versions: whether the packages of its kernels must have the versions that it was
            exported with. JAX reads programs of versions up to 6 months older.

    Returns:
        The program, ready to be called.

    Raises:
        StoreError: the source is not such a file, or was altered; a package of its kernels isn't
            installed, or has another version.
        KernelError: a kernel can't be registered.
    """
    path = Path("program") if isinstance(source, bytes) else Path(source)
    try:
        text = source if isinstance(source, bytes) else path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path} must be a file that can be read: {error}.") from error
    if not text.startswith(_MAGIC):
        raise StoreError(f"{path} must be a file that plan.export(...).save wrote, got another.")
    start = len(_MAGIC) + _DIGEST
    body = text[start:]
    if hashlib.sha256(body).digest() != text[len(_MAGIC) : start]:
        raise damaged(path, "its checksum differs")
    end = 8 + int.from_bytes(body[:8], "little")
    try:
        header = json.loads(body[8:end])
        kernels = {name: KernelOf(**kernel) for name, kernel in header["kernels"].items()}
        jax_version = header["jax"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(path, f"its header can't be read ({error!r})") from error
    register(kernels, check_versions)
    import_nodes()
    try:
        exported = jax.export.deserialize(bytearray(body[end:]))
    except Exception as error:
        raise StoreError(
            f"{path} must be of a version of JAX that JAX {jax.__version__} can read, got one of "
            f"JAX {jax_version}: {error}. Export it again."
        ) from error
    return ExportedProgram(exported, kernels)


def _types(avals: Any) -> str:
    """Return the types of arrays; of many, their number and the last."""
    if len(avals) <= 4:
        return ", ".join(aval.str_short() for aval in avals)
    return f"{len(avals)} arrays, {', '.join(aval.str_short() for aval in avals[-2:])} the last"


def fitted(given: Any, wanted: Any) -> Any:
    """Return parameters in the form that a program takes, packed or not.

    Raises:
        StoreError: ``given`` is another tree, or a parameter is quantized in another way.
    """
    found, expected = jax.tree_util.tree_flatten_with_path(wanted, is_leaf=is_kept)
    try:
        parts = expected.flatten_up_to(given)
    except ValueError:
        parts = None
    if parts is None or not all(map(_fits, parts, (kind for _, kind in found))):
        shown = jax.tree.structure(given, is_leaf=is_kept)
        raise StoreError(
            f"The parameters must be a tree like that of the program, {expected}, got {shown}. "
            "Load what was exported, with template= where it has other nodes than dicts, lists "
            "and tuples."
        )
    leaves = []
    for (path, kind), leaf in zip(found, parts, strict=True):
        new = _fitted(leaf, kind)
        if _type(new) != _type(kind):
            raise StoreError(
                f"{jax.tree_util.keystr(path)} must be {_said(kind)} for this program, got "
                f"{_said(leaf)}. Give the parameters that it was exported for."
            )
        leaves.append(new)
    return jax.tree.unflatten(expected, leaves)


def _fits(given: Any, wanted: Any) -> bool:
    """Return whether a part of a tree is one parameter."""
    # A parameter with an adapter that is loaded without a plan is a dict of its arrays.
    is_loaded = (
        is_adapted(wanted)
        and isinstance(given, Mapping)
        and given.keys() == {"base", *wanted.arrays}
    )
    return is_loaded or jax.tree_util.all_leaves([given], is_leaf=is_kept)


def _fitted(given: Any, wanted: Any) -> Any:
    """Return one parameter in the form of another where that is possible."""
    if is_adapted(wanted):
        if isinstance(given, Mapping):
            arrays = {name: given[name] for name in wanted.arrays}
            given = AdaptedWeight(given["base"], arrays, wanted.form)
        if is_adapted(given):
            return dataclasses.replace(given, base=_fitted(given.base, wanted.base))
    if isinstance(wanted, Carrier) and isinstance(given, Carrier):
        derived = {key: _fitted(one, wanted.derived.get(key)) for key, one in given.derived.items()}
        own, inputs = _fitted(given.own, wanted.own), wanted.inputs
        return dataclasses.replace(given, own=own, derived=derived, inputs=inputs)
    if qn.is_form(wanted) and qn.is_form(given):
        return given.with_values(lambda values: _repacked(values, wanted.values))
    return given


def _repacked(given: Any, wanted: Any) -> Any:
    """Return quantized values in the layout of others, a kernel's or none, where possible."""
    if wanted.platform is None:
        return given if given.platform is None else given.portable(wanted.scale_shape)
    if given.platform is not None:
        return given
    packing = packing_of(wanted)
    fits = given.shape == wanted.shape and given.zero_point is None
    fits = fits and _type(packed_type(given, packing)) == _type(wanted)
    return pack(given, packing) if fits else given


def _type(leaf: Any) -> Any:
    leaves, treedef = jax.tree.flatten(leaf)
    return treedef, [(tuple(x.shape), x.dtype) for x in leaves]


def _said(leaf: Any) -> str:
    kind = getattr(leaf, "qtype", None) or getattr(leaf, "dtype", type(leaf).__name__)
    name = type(leaf).__name__ if is_kept(leaf) else "array"
    arrays = ", ".join(f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(leaf))
    return f"a {name} of {kind}{list(getattr(leaf, 'shape', ()))} ({arrays})"
