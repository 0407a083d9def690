"""The public names, and the modules that they are from."""

from .models import export_model as export_model
from .models import model_parameters as model_parameters
from .program import ExportedProgram as ExportedProgram
from .program import load_exported as load_exported

__version__: str
