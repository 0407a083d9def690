"""The public names, and the modules that they are from."""

from .allocate.result import AllocatedWeight as AllocatedWeight
from .allocate.result import Allocation as Allocation
from .awq import Awq as Awq
from .base import Pass as Pass
from .gptq import Gptq as Gptq
from .ranges import Ranges as Ranges
from .report import Optimized as Optimized
from .report import PassReport as PassReport
from .rotation import Hadamard as Hadamard
from .smoothquant import SmoothQuant as SmoothQuant
from .transformed import Rotated as Rotated
from .transformed import Scaled as Scaled
from .transformed import TransformedWeight as TransformedWeight
from .wanda import Wanda as Wanda

__version__: str
