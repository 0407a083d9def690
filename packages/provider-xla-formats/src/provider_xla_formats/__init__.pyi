"""The public names, and the modules that they are from."""

from .affine import AffineWeight as AffineWeight
from .float_files import INDEX as INDEX
from .float_files import SINGLE as SINGLE
from .float_files import Names as Names
from .float_files import Source as Source
from .float_files import TensorFiles as TensorFiles
from .float_files import leaf_of as leaf_of
from .float_files import source_of as source_of
from .gguf import GgufFile as GgufFile
from .gguf import load_gguf as load_gguf
from .gguf import read_gguf_metadata as read_gguf_metadata
from .gguf import save_gguf as save_gguf
from .huggingface.compressed_tensors import save_compressed_tensors as save_compressed_tensors
from .huggingface.load import load_huggingface as load_huggingface
from .names import Target as Target
from .quantize_files import quantize_file as quantize_file
from .rules import rules_of as rules_of

__version__: str
