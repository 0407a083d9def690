"""orbax checkpoints with a manifest and checksums in another file.

A checkpoint is a folder with ``jaxtap.json`` and orbax's item ``tensors``: an array per tensor,
with the names that a safetensors file would have. Quantized values of dtypes that tensorstore lacks
are stored as int8 or uint8, which tensorstore compresses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from msgspec import field

from ..errors import StoreError, damaged
from ..extras import require_extra
from .manifest import Manifest, Opened, read_sealed
from .placing import Placement
from .schema import BLANK, FIELD, Object, canonical, seal

BESIDE = "jaxtap.json"
_ITEM = "tensors"
_WIDER = {"int2": "int8", "uint2": "uint8", "int4": "int8", "uint4": "uint8"}


def write(path: Path, manifest: Manifest, tensors: Mapping[str, Any]) -> None:
    """Write a checkpoint to a folder that doesn't exist."""
    ocp = require_extra("orbax.checkpoint", "orbax")
    # Orbax can't store arrays of size 0: the manifest, which has their shapes, is enough.
    arrays = {name: _widened(array) for name, array in tensors.items() if array.size}
    if arrays:
        try:
            with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
                item = ocp.args.PyTreeSave(arrays)
                checkpointer.save(path.absolute(), ocp.args.Composite(**{_ITEM: item}))
        except Exception as error:
            # A full disk is a ValueError of tensorstore, and other errors in other versions.
            raise StoreError(
                f"orbax can't write {path.parent}: {error}. Make space or choose another folder; "
                "what was there is as it was."
            ) from error
    else:
        path.mkdir()
    digests = {str(file.relative_to(path).as_posix()): _digest(file) for file in _files(path)}
    beside = {FIELD: BLANK, "files": digests, "manifest": manifest.as_json()}
    (path / BESIDE).write_bytes(seal(canonical(beside).encode()))


class _Beside(Object, frozen=True):
    """The content of ``jaxtap.json``: checksums by file, and the manifest."""

    sha256: str = field(name=FIELD)
    files: dict[str, str]
    manifest: dict[str, Any]


class Reader(Opened):
    """Read a checkpoint after checking all of its files.

    Raises:
        StoreError: a file is missing, cut short or altered, or ``save`` did not write it.
    """

    def __init__(self, path: Path):
        self._path = path
        try:
            beside, self.manifest = read_sealed(path, BESIDE, _Beside)
        except FileNotFoundError:
            raise StoreError(
                f"{path} has no {BESIDE}: a file was removed, or it was not written by "
                "provider_xla.save. Restore other checkpoints with orbax, and quantize them."
            ) from None
        self._check(beside.files)

    def read(self, placements: Mapping[str, Placement]) -> Callable[[str], Any]:
        """Return what reads tensors; see ``Opened``."""
        ocp = require_extra("orbax.checkpoint", "orbax")
        wanted, how, result = {}, {}, {}
        for name, placement in placements.items():
            dtype, shape = self.manifest.tensors[name]
            if 0 in shape:
                result[name] = np.zeros(shape, jnp.dtype(dtype))
                continue
            sharding = placement.sharding
            kept = jnp.dtype(_WIDER.get(dtype, dtype))
            wanted[name] = jax.ShapeDtypeStruct(shape, kept, sharding=sharding)
            if sharding is None:
                how[name] = ocp.RestoreArgs(restore_type=np.ndarray)
            else:
                how[name] = ocp.ArrayRestoreArgs(sharding=sharding, global_shape=shape, dtype=kept)
        if wanted:
            restore = ocp.args.PyTreeRestore(wanted, restore_args=how, partial_restore=True)
            try:
                with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
                    item = ocp.args.Composite(**{_ITEM: restore})
                    found = checkpointer.restore(self._path.absolute(), item)[_ITEM]
            except (ValueError, KeyError, OSError) as error:
                raise StoreError(f"{self._path} can't be restored by orbax: {error}") from error
            result.update(found)

        def take(name: str) -> Any:
            array = result.pop(name)
            dtype = jnp.dtype(self.manifest.tensors[name][0])
            array = array if array.dtype == dtype else array.astype(dtype)
            return array if isinstance(array, jax.Array) else placements[name].put(array)

        return take

    def _check(self, digests: Mapping[str, str]) -> None:
        """Raise StoreError unless the files are those that were written."""
        there = {file.relative_to(self._path).as_posix(): file for file in _files(self._path)}
        there.pop(BESIDE)
        for name in sorted(digests.keys() | there.keys()):
            if name not in there:
                raise damaged(self._path, f"its file {name} is missing")
            if name not in digests:
                raise damaged(self._path, f"a file {name} was added")
            if _digest(there[name]) != digests[name]:
                raise damaged(self._path, f"the checksum of its file {name} is not its own")


def _widened(array: Any) -> Any:
    """Return an array of a dtype that tensorstore has, on its devices."""
    wider = _WIDER.get(array.dtype.name)
    if isinstance(array, np.generic):
        array = np.asarray(array)
    return array if wider is None else array.astype(jnp.dtype(wider))


def _files(path: Path) -> list[Path]:
    """Return a folder's files without hidden ones."""
    return [f for f in sorted(path.rglob("*")) if f.is_file() and not f.name.startswith(".")]


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
