"""The names, and the modules that they are from."""

# Programs as jaxprs, run with some equations made otherwise.
from .._compat import bind_again as bind_again
from .._compat import closed_of as closed_of
from .._compat import name_of as name_of
from .._compat import parts_of_scan as parts_of_scan

# A program's operations and tensors.
from ..capture.channels import matrix_axes as matrix_axes
from ..capture.graph import Node as Node
from ..capture.graph import Use as Use
from ..capture.ops import PRIMITIVE as PRIMITIVE
from ..capture.ops import RANDOM as RANDOM
from ..capture.ops import Op as Op
from ..capture.ops import Passage as Passage
from ..capture.ops import Scales as Scales
from ..capture.ops import is_float as is_float
from ..capture.ops import ops as ops
from ..capture.survey import keeps_loops as keeps_loops
from ..capture.survey import prepared as prepared

# What a plan decides.
from ..decide.decision import ConstantUse as ConstantUse
from ..decide.decision import Decision as Decision
from ..decide.decision import DynamicUse as DynamicUse
from ..decide.decision import Quantize as Quantize
from ..decide.decision import Site as Site
from ..decide.decision import SiteUse as SiteUse
from ..decide.decision import WeightUse as WeightUse
from ..decide.plan import stored_bytes as stored_bytes
from ..decide.plan import why as why
from ..decide.rules import INT8 as INT8
from ..files import save as save
from ..jaxprs import HOLDERS as HOLDERS
from ..jaxprs import Interpreter as Interpreter
from ..jaxprs import equations_in as equations_in
from ..jaxprs import program_of as program_of

# A plan replayed, and the ranges that it was trained with.
from ..train.manifest import Manifest as Manifest
from ..train.noise import noise_to_signal as noise_to_signal
from ..train.parameters import quantized_blocks as quantized_blocks
from ..train.replay import Replay as Replay
from ..train.replay import Runtime as Runtime
from ..train.replay import inverted as inverted
from ..train.statistics import check_statistics as check_statistics
from ..trees import is_array as is_array
from ..trees import is_key as is_key
from ..trees import split as split
