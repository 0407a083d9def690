"""The public names, and the modules that they are from."""

from .config import Config as Config
from .config import LlmError as LlmError
from .fields import read_config as read_config
from .folders import load as load
from .generate import Generator as Generator
from .generate import Sampling as Sampling
from .losses import perplexity as perplexity
from .quantized import quantize as quantize
from .tokenizer import read_tokenizer as read_tokenizer
from .training import Recipe as Recipe
from .training import finetune as finetune

__version__: str
