"""Write safetensors files as a stream, and read them with checksums.

The format: 8 bytes with the length of a JSON header, the header, and the tensors. Here its
``__metadata__`` holds the manifest, the SHA-256 of each tensor's bytes, and that of the header.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np

from ..errors import StoreError, damaged
from ..extras import require_extra
from .carriers import carrier, decode, encode, header, layout, raw
from .manifest import Manifest, Opened, reading
from .schema import BLANK, FIELD, canonical, check, is_intact, read_json, seal

_LONGEST = 100_000_000
"""Bytes of a header: the format's own limit."""
_MANIFEST, _TENSORS = "jaxtap.manifest", "jaxtap.tensors"


class Writer:
    """Write tensors in any order into a file of known layout.

    A context manager. ``finish`` writes the header; until then the file can't be read.
    """

    def __init__(self, path: Path, manifest: Manifest):
        self._manifest = manifest
        self._digests: dict[str, str] = {}
        self._entries = layout({name: carrier(*found) for name, found in manifest.tensors.items()})
        self._start = 8 + len(self._header())
        end = max((entry["data_offsets"][1] for entry in self._entries.values()), default=0)
        self._file = path.open("xb")
        self._file.truncate(self._start + end)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, name: str, array: Any) -> None:
        """Write a tensor."""
        dtype, shape = self._manifest.tensors[name]
        array = np.asarray(array)
        assert (array.dtype.name, array.shape) == (dtype, shape), (name, array.dtype, array.shape)
        data = raw(encode(array))
        self._digests[name] = hashlib.sha256(data).hexdigest()
        self._file.seek(self._start + self._entries[name]["data_offsets"][0])
        self._file.write(data)

    def finish(self) -> None:
        """Write the header."""
        missing = self._entries.keys() - self._digests.keys()
        assert not missing, missing
        text = self._header()
        self._file.seek(0)
        self._file.write(seal(struct.pack("<Q", len(text)) + text))
        self._file.flush()

    def _header(self) -> bytes:
        """Return the header, whose length does not depend on checksums."""
        digests = {name: self._digests.get(name, BLANK) for name in self._manifest.tensors}
        metadata = {
            FIELD: BLANK,
            _MANIFEST: canonical(self._manifest.as_json()),
            _TENSORS: canonical(digests),
        }
        text = header(metadata, self._entries)
        if len(text) > _LONGEST:
            raise StoreError(
                f"The header would have {len(text)} bytes, and the safetensors format allows "
                f"{_LONGEST}. Save through orbax, or in several files."
            )
        return text


class Reader(Opened):
    """Read tensors, and compare each with its checksum.

    The safetensors library opens the file, and checks the header again.

    Raises:
        StoreError: the file is cut short, altered, or was not written by ``save``.
    """

    def __init__(self, path: Path):
        safetensors = require_extra("safetensors", "safetensors")
        self._path = path
        text = _read_header(path)
        with reading(path, "its header"):
            metadata = read_json(text)["__metadata__"]
            manifest, digests = (read_json(metadata[key]) for key in (_MANIFEST, _TENSORS))
            self._digests = check(digests, dict[str, str])
            self.manifest = Manifest.from_json(manifest)
        try:
            # pread: a file that is cut while it is read is an error, not a signal.
            self._file = safetensors.safe_open(path, framework="np", backend="pread")
            self._names = set(self._file.keys())
        except safetensors.SafetensorError as error:
            raise damaged(path, str(error)) from error
        if not self._names == self.manifest.tensors.keys() == digests.keys():
            raise damaged(path, "its manifest names other tensors than it has")

    def __exit__(self, *_: object) -> None:
        self._file = None

    def read(self, placements: Mapping[str, Any]) -> Callable[[str], Any]:
        """Return what reads tensors; see ``Opened``."""
        return lambda name: placements[name].put(self.tensor(name))

    def tensor(self, name: str) -> np.ndarray:
        """Read a tensor.

        Raises:
            StoreError: its bytes are not those that were written.
        """
        safetensors = require_extra("safetensors", "safetensors")
        try:
            array = self._file.get_tensor(name)
        except (safetensors.SafetensorError, OSError) as error:
            raise damaged(self._path, f"{name} can't be read ({error})") from error
        found = hashlib.sha256(raw(array)).hexdigest()
        if found != self._digests[name]:
            raise damaged(self._path, f"the checksum of {name} is {found[:16]}..., not its own")
        dtype, shape = self.manifest.tensors[name]
        try:
            return decode(array, dtype, shape)
        except ValueError as error:
            raise damaged(self._path, f"{name}: {error}") from error


def _read_header(path: Path) -> bytes:
    """Return the header of a file whose checksum is right."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if not 2 <= length <= min(size - 8, _LONGEST):
            raise damaged(path, f"of {size} bytes the header would be {length}")
        text = file.read(length)
    intact = is_intact(start + text)
    if intact is None:
        raise StoreError(
            f"{path} has no manifest: it was altered, or it was not written by provider_xla.save. "
            "Quantize a file of float parameters by provider_xla.quantize_file."
        )
    if not intact:
        raise damaged(path, "the checksum of its header is not its own")
    return text
