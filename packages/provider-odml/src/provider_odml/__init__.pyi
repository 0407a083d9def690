"""The public names, and the modules that they are from."""

from quant_numerics import MovingAverage as MovingAverage

from .decide.plan import Plan as Plan
from .decide.rules import OdmlRule as OdmlRule
from .errors import ConversionError as ConversionError
from .errors import ManifestError as ManifestError
from .errors import MismatchError as MismatchError
from .errors import MissingExtraError as MissingExtraError
from .errors import OdmlError as OdmlError
from .errors import OdmlWarning as OdmlWarning
from .exporting.artifact import Artifact as Artifact
from .exporting.backend import ExportBackend as ExportBackend
from .exporting.backend import FloatFile as FloatFile
from .exporting.backend import QuantizedFile as QuantizedFile
from .exporting.conversion import OdmlConversionProvider as OdmlConversionProvider
from .exporting.export import export as export
from .exporting.match import FileOp as FileOp
from .exporting.report import Report as Report
from .exporting.signature import Signature as Signature
from .train.provider import OdmlQatProvider as OdmlQatProvider
from .train.provider import QatModel as QatModel
from .train.provider import qat as qat
from .train.refine import refine as refine
from .train.statistics import QuantStats as QuantStats

__version__: str
