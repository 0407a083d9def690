"""The public names, and the modules that they are from."""

from .errors import ConversionError as ConversionError
from .errors import MismatchError as MismatchError
from .errors import OdmlWarning as OdmlWarning
from .exporting.backend import ExportBackend as ExportBackend
from .exporting.backend import FloatFile as FloatFile
from .exporting.backend import QuantizedFile as QuantizedFile
from .exporting.conversion import OdmlConversionProvider as OdmlConversionProvider
from .exporting.export import export as export
from .exporting.match import FileOp as FileOp
from .exporting.report import Artifact as Artifact
from .exporting.report import Report as Report
from .exporting.signature import Signature as Signature

__version__: str
