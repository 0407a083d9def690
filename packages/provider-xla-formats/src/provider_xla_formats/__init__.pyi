"""The public names, and the modules that they are from."""

from .compressed_tensors import load_compressed_tensors as load_compressed_tensors
from .compressed_tensors import save_compressed_tensors as save_compressed_tensors
from .gguf import load_gguf as load_gguf
from .gguf import read_gguf_metadata as read_gguf_metadata
from .gguf import save_gguf as save_gguf
from .names import Target as Target
from .rules import rules_of as rules_of

__version__: str
