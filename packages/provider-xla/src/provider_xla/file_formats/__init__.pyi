"""The names, and the modules that they are from."""

from ..errors import StoreError as StoreError
from ..errors import damaged as damaged
from ..extras import require_extra as require_extra
from ..program.arrays import is_stored as is_stored
from ..store.carriers import DTYPES as DTYPES
from ..store.carriers import write_tensors as write_tensors
from ..store.files import atomic_write as atomic_write
from ..store.placing import placer as placer
from ..store.save import save_each as save_each
from ..store.tree import Leaf as Leaf
from ..store.tree import named_leaves as named_leaves
from ..store.tree import with_leaves as with_leaves
