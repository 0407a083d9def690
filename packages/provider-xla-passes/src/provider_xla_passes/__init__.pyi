"""The public names, and the modules that they are from."""

from .allocate.allocate import AllocatedWeight as AllocatedWeight
from .allocate.allocate import Allocation as Allocation
from .channels import Awq as Awq
from .channels import Hadamard as Hadamard
from .channels import SmoothQuant as SmoothQuant
from .channels import Wanda as Wanda
from .gptq import Gptq as Gptq
from .optimize import Optimized as Optimized
from .optimize import PassReport as PassReport
from .ranges import Ranges as Ranges
from .state import Pass as Pass
from .transformed import Rotated as Rotated
from .transformed import Scaled as Scaled
from .transformed import TransformedWeight as TransformedWeight

__version__: str
