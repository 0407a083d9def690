"""Folders of several processes: shards by each, one index.

A folder has ``jaxtap.index.json``, with the manifest, the pieces of each tensor and the checksums
of the files, and a file of the safetensors format for each process. A piece is a block of a
tensor; the pieces of a tensor hold each of its elements once. Any number of processes can load the
folder, and each reads the pieces that its devices need.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from msgspec import field

from ..errors import StoreError, damaged
from .files import atomic_write
from .manifest import Manifest, Opened, read_sealed
from .placing import Placement
from .safetensors import Reader as File
from .safetensors import Writer
from .schema import (
    BLANK,
    FIELD,
    FileName,
    Object,
    Size,
    StoredLeaf,
    Tree,
    canonical,
    seal,
)

INDEX = "jaxtap.index.json"
Block = tuple[tuple[int, int], ...]
"""Where a piece begins and ends along each axis of its tensor."""


class _Index(Object, frozen=True):
    """The index: checksums by file; file, name and block by tensor."""

    sha256: str = field(name=FIELD)
    files: dict[FileName, str]
    manifest: dict[str, Any]
    pieces: dict[str, list[tuple[str, str, tuple[tuple[Size, Size], ...]]]]


def file_name(process: int, count: int) -> str:
    """Return the name of the file of a process."""
    return f"shard-{process + 1:05}-of-{count:05}.safetensors"


def own_pieces(array: Any, is_first: bool) -> dict[Block, Any]:
    """Return the blocks that this process writes, on host or device.

    If several devices hold a block, one of them writes it. An array that is local to the process,
    such as NumPy's, is taken to be the same in all processes, and the first one writes it.
    """
    is_own = not isinstance(array, jax.Array) or array.is_fully_addressable
    if is_own and (jax.process_count() > 1 or not isinstance(array, jax.Array)):
        return {tuple((0, size) for size in np.shape(array)): array} if is_first else {}
    found = {}
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            sides = zip(shard.index, array.shape, strict=True)
            block = tuple(side.indices(size)[:2] for side, size in sides)
            found[block] = shard.data
    return found


def write_pieces(
    path: Path, manifest: Manifest, pieces: Mapping[str, Mapping[Block, Any]]
) -> dict[str, list[Any]]:
    """Write a file of pieces; return by tensor a list of [file, name of the piece, block]."""
    listed: dict[str, list[Any]] = {}
    arrays: dict[str, Any] = {}
    types: dict[str, tuple[str, tuple[int, ...]]] = {}
    for tensor, blocks in pieces.items():
        for number, (block, array) in enumerate(blocks.items()):
            name = f"{tensor}@{number}"
            arrays[name] = array
            types[name] = manifest.tensors[tensor][0], tuple(end - begin for begin, end in block)
            listed.setdefault(tensor, []).append([path.name, name, [list(side) for side in block]])
    leaves = tuple(
        StoredLeaf(
            kind="numpy",
            about={"shape": list(shape), "dtype": dtype},
            name=name,
            tensors={"": name},
        )
        for name, (dtype, shape) in types.items()
    )
    structure = {"dict": [[name, i] for i, name in enumerate(arrays)]}
    own = Manifest(Tree(structure, leaves), None, types, None, manifest.versions)
    with Writer(path, own) as writer:
        for name, array in arrays.items():
            writer.write(name, array)
        writer.finish()
    return listed


def write_index(folder: Path, manifest: Manifest, listed: Sequence[Mapping[str, Any]]) -> None:
    """Write the index of a folder that has all its files."""
    pieces: dict[str, list[Any]] = {name: [] for name in manifest.tensors}
    for one in listed:
        for tensor, found in one.items():
            pieces[tensor] += found
    files = {file.name: _digest(file) for file in sorted(folder.glob("shard-*"))}
    index = {FIELD: BLANK, "files": files, "manifest": manifest.as_json(), "pieces": pieces}
    (folder / INDEX).write_bytes(seal(canonical(index).encode()))


class Reader(Opened):
    """Read a folder of shards.

    The index and the headers of files are checked at once, and each piece when it is read.

    Raises:
        StoreError: a file is missing, cut short or altered.
    """

    def __init__(self, path: Path):
        self._path = path
        index, self.manifest = read_sealed(path, INDEX, _Index)
        self._pieces = index.pieces
        self._files = {}
        for name, digest in index.files.items():
            if not (path / name).is_file():
                raise damaged(path, f"its file {name} is missing")
            if _digest(path / name) != digest:
                raise damaged(path, f"the header of its file {name} is not its own")
            self._files[name] = File(path / name)
        self._check()

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.__exit__()

    def read(self, placements: Mapping[str, Placement]) -> Callable[[str], Any]:
        """Return what reads tensors; see ``Opened``."""

        def take(name: str) -> Any:
            shape = self.manifest.tensors[name][1]
            pieces: dict[tuple[str, str], np.ndarray] = {}

            def part(index: tuple[slice, ...]) -> np.ndarray:
                sides = zip(index, shape, strict=True)
                block = tuple(side.indices(size)[:2] for side, size in sides)
                return self._block(name, block, pieces)

            return placements[name].fill(shape, part)  # on each device its part

        return take

    def _block(
        self, tensor: str, wanted: Block, pieces: dict[tuple[str, str], np.ndarray]
    ) -> np.ndarray:
        """Return a block of a tensor, and add the pieces that are read to ``pieces``."""
        dtype, _ = self.manifest.tensors[tensor]
        result = np.empty([end - begin for begin, end in wanted], jnp.dtype(dtype))
        for file, name, block in self._pieces[tensor]:
            both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, block, strict=True)]
            if any(begin >= end for begin, end in both):
                continue
            if (file, name) not in pieces:
                pieces[file, name] = self._files[file].tensor(name)
            target, source = (
                tuple(
                    slice(begin - side[0], end - side[0])
                    for (begin, end), side in zip(both, sides, strict=True)
                )
                for sides in (wanted, block)
            )
            result[target] = pieces[file, name][source]
        return result

    def _check(self) -> None:
        """Raise StoreError unless each tensor's pieces are complete."""
        if self._pieces.keys() != self.manifest.tensors.keys():
            raise damaged(self._path, "its manifest names other tensors than it has")
        for tensor, (dtype, shape) in self.manifest.tensors.items():
            if not _is_grid([block for _, _, block in self._pieces[tensor]], shape):
                raise damaged(self._path, f"the pieces of {tensor} are not all of it")
            for file, name, block in self._pieces[tensor]:
                kind = dtype, tuple(end - begin for begin, end in block)
                if file not in self._files or self._files[file].manifest.tensors.get(name) != kind:
                    raise damaged(self._path, f"{file} has no piece {name} of {tensor}")


def _is_grid(blocks: Sequence[Block], shape: Sequence[int]) -> bool:
    """Return whether blocks tile an array as a grid, each once."""
    if len(set(blocks)) != len(blocks) or any(len(block) != len(shape) for block in blocks):
        return False
    # Along each axis the sides must follow one another without a gap. If there are as many
    # different blocks as such a grid has cells, they are all of it.
    count = 1
    for axis, length in enumerate(shape):
        sides = sorted({block[axis] for block in blocks})
        ends = [0, *(end for _, end in sides)]
        if [begin for begin, _ in sides] != ends[:-1] or ends[-1] != length or not sides:
            return False
        count *= len(sides)
    return count == len(blocks)


def _digest(file: Path) -> str:
    """Return the checksum of a file's header, which holds its tensors'."""
    with file.open("rb") as opened:
        start = opened.read(8)
        return hashlib.sha256(start + opened.read(int.from_bytes(start, "little"))).hexdigest()


def tell_all(value: Any) -> list[Any]:
    """Tell all processes a JSON value; return all values in order."""
    if jax.process_count() == 1:
        return [value]
    # Processes can only gather arrays of equal shapes: bytes, filled up to the longest.
    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.asarray(data.size, np.int32))
    filled = np.zeros(int(np.max(sizes)), np.uint8)
    filled[: data.size] = data
    found = np.asarray(multihost_utils.process_allgather(filled))
    lines = found.reshape(jax.process_count(), -1)
    return [
        json.loads(line[: int(size)].tobytes())
        for line, size in zip(lines, np.ravel(sizes), strict=True)
    ]


def step(what: str, run: Callable[[], Any]) -> list[Any]:
    """Run a step in each process, and return all results.

    Raises:
        StoreError: the step failed in another process. The process where it failed raises the error
            itself.
    """
    result, error = None, None
    try:
        result = run()
    except Exception as caught:
        error = caught
    found = tell_all([result, None if error is None else f"{type(error).__name__}: {error}"])
    if error is not None:
        raise error
    for process, (_, failed) in enumerate(found):
        if failed is not None:
            raise StoreError(f"{what} failed in process {process}: {failed}")
    return [value for value, _ in found]


@contextlib.contextmanager
def appearing_in_all(path: Path, overwrite: bool) -> Iterator[Path]:
    """Yield one folder to all processes, which replaces ``path`` at the end.

    Process 0 makes the folder; see ``atomic_write``.
    """
    with contextlib.ExitStack() as stack:

        def begin() -> str | None:
            if jax.process_index():
                return None
            new = stack.enter_context(atomic_write(path, overwrite))
            new.mkdir()
            return str(new)

        new = step(f"Writing {path}", begin)[0]
        try:
            yield Path(new)
        except BaseException as error:
            if not stack.__exit__(type(error), error, error.__traceback__):
                raise
            return
        step(f"Writing {path}", stack.close)
