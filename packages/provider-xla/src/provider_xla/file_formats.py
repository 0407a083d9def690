"""What packages need that read and write files of other libraries: public, as `Source` is."""

from .errors import StoreError as StoreError
from .errors import damaged as damaged
from .extras import require as require_extra
from .program.arrays import is_stored as is_stored
from .store.carriers import NAMES as DTYPES
from .store.files import appearing as atomic_write
from .store.float_files import INDEX as INDEX
from .store.float_files import SINGLE as SINGLE
from .store.float_files import Names as Names
from .store.float_files import TensorFiles as TensorFiles
from .store.float_files import leaf_of as leaf_of
from .store.float_files import source_of as source_of
from .store.float_files import write_tensors as write_tensors
from .store.tree import describe as named_leaves
from .store.tree import fill as with_leaves

__all__ = [
    "DTYPES",
    "INDEX",
    "SINGLE",
    "Names",
    "StoreError",
    "TensorFiles",
    "atomic_write",
    "damaged",
    "is_stored",
    "leaf_of",
    "named_leaves",
    "require_extra",
    "source_of",
    "with_leaves",
    "write_tensors",
]
