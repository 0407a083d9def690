"""The names of jaxtap, for type checkers."""

from provider_xla import CacheRule as CacheRule
from provider_xla import Gradient as Gradient
from provider_xla import Lora as Lora
from provider_xla import Plan as Plan
from provider_xla import Presets as Presets
from provider_xla import PtqProvider as PtqProvider
from provider_xla import Q as Q
from provider_xla import QtProvider as QtProvider
from provider_xla import QtRule as QtRule
from provider_xla import QuantizationError as QuantizationError
from provider_xla import QuantizationRule as QuantizationRule
from provider_xla import QuantizationWarning as QuantizationWarning
from provider_xla import Rule as Rule
from provider_xla import Static as Static
from provider_xla import StoreError as StoreError
from provider_xla import calibrate_model as calibrate_model
from provider_xla import load as load
from provider_xla import load_exported as load_exported
from provider_xla import load_model as load_model
from provider_xla import merge_model as merge_model
from provider_xla import model_plan as model_plan
from provider_xla import presets as presets
from provider_xla import quantize_file as quantize_file
from provider_xla import quantize_model as quantize_model
from provider_xla import quantize_params as quantize_params
from provider_xla import save as save
from provider_xla import save_model as save_model

from . import gguf as gguf
from . import huggingface as huggingface
from . import llm as llm
from . import lora as lora
from . import odml as odml
from . import optim as optim
from . import passes as passes
from .programs import get_provider as get_provider
from .programs import plan as plan
from .programs import providers as providers
from .programs import report as report
from .programs import train as train

__version__: str
