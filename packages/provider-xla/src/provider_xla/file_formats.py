"""What packages need that read and write files of other libraries: public, as `Source` is."""

from .extras import require as require_extra
from .forms.tree import is_stored as is_stored
from .store.errors import StoreError as StoreError
from .store.errors import damaged as damaged
from .store.files import appearing as atomic_write
from .store.float_files import INDEX as INDEX
from .store.float_files import SINGLE as SINGLE
from .store.float_files import WIDER as WIDER
from .store.float_files import Names as Names
from .store.float_files import files_of as safetensors_files
from .store.float_files import source_of as source_of
from .store.tree import describe as named_leaves
from .store.tree import fill as with_leaves

__all__ = [
    "INDEX",
    "SINGLE",
    "WIDER",
    "Names",
    "StoreError",
    "atomic_write",
    "damaged",
    "is_stored",
    "named_leaves",
    "require_extra",
    "safetensors_files",
    "source_of",
    "with_leaves",
]
