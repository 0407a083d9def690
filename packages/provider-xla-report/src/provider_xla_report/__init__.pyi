"""The public names, and the modules that they are from."""

from .quality import QualityReport as QualityReport

__version__: str
