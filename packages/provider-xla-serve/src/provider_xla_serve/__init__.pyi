"""The public names, and the modules that they are from."""

from .make import export_model as export_model
from .make import model_parameters as model_parameters
from .program import ExportedProgram as ExportedProgram
from .program import load_exported as load_exported

__version__: str
