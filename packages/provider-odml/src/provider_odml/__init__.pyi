"""The public names, and the modules that they are from."""

from provider_odml_export import Artifact as Artifact
from provider_odml_export import ConversionError as ConversionError
from provider_odml_export import ExportBackend as ExportBackend
from provider_odml_export import FileOp as FileOp
from provider_odml_export import FloatFile as FloatFile
from provider_odml_export import MismatchError as MismatchError
from provider_odml_export import OdmlConversionProvider as OdmlConversionProvider
from provider_odml_export import OdmlWarning as OdmlWarning
from provider_odml_export import QuantizedFile as QuantizedFile
from provider_odml_export import Report as Report
from provider_odml_export import Signature as Signature
from provider_odml_export import export as export
from quant_numerics import MovingAverage as MovingAverage

from .decide.plan import Plan as Plan
from .decide.rules import OdmlRule as OdmlRule
from .errors import ManifestError as ManifestError
from .errors import MissingExtraError as MissingExtraError
from .errors import OdmlError as OdmlError
from .train.provider import OdmlQatProvider as OdmlQatProvider
from .train.provider import QatModel as QatModel
from .train.provider import qat as qat
from .train.refine import refine as refine
from .train.statistics import QuantStats as QuantStats

__version__: str
