"""The names, and the modules that they are from."""

# Model objects.
from ..bridges.bridge import holds_kept as holds_kept
from ..bridges.bridge import keeps_floats as keeps_floats
from ..bridges.bridge import path_of as path_of

# Adapters.
from ..forms import AdapterForm as AdapterForm

# Stored forms that hold another one.
from ..forms import AroundStored as AroundStored
from ..forms import is_adapted as is_adapted
from ..forms import is_kept as is_kept
from ..kernels.matmul import Rotation as Rotation
from ..kernels.packed import PACK_OPS as PACK_OPS
from ..kernels.packed import pack as pack
from ..kernels.packed import packed_type as packed_type
from ..kernels.packed import packing_of as packing_of
from ..measure.probe import Largest as Largest
from ..measure.probe import Lookup as Lookup
from ..measure.probe import Probed as Probed

# Runs of a plan's function in float, that look at operations.
from ..measure.probe import numbered as numbered
from ..measure.probe import probe as probe
from ..measure.probe import stored_operand as stored_operand
from ..measure.probe import whole as whole
from ..measure.probe import whole_results as whole_results
from ..plan.beside import in_float as in_float
from ..plan.other_rules import replanned as replanned
from ..plan.other_rules import tried as tried
from ..plan.plan import NO_ADAPTERS as NO_ADAPTERS
from ..plan.plan import OF_ADAPTERS as OF_ADAPTERS

# The parameters of a plan, and how they are stored.
from ..plan.quantize import carried as carried
from ..plan.quantize import check_parameters as check_parameters
from ..plan.quantize import prepacked as prepacked
from ..plan.views import is_in_order as is_in_order
from ..plan.views import places_in as places_in
from ..plan.weight import quantize_leaf as quantize_leaf
from ..program.arrays import as_batch as as_batch
from ..program.arrays import by_path as by_path
from ..program.arrays import followed as followed
from ..program.arrays import is_array as is_array
from ..program.arrays import is_stored as is_stored
from ..program.arrays import map_params as map_params
from ..program.arrays import of_arrays as of_arrays
from ..program.arrays import own_form as own_form
from ..program.arrays import parameters_of as parameters_of
from ..program.arrays import prefix_of as prefix_of
from ..program.arrays import takes_any as takes_any

# Operations, and what is said of them.
from ..program.facts import Code as Code
from ..program.facts import Fact as Fact
from ..program.facts import joined as joined
from ..program.fused import FusedOp as FusedOp
from ..program.fused import Joining as Joining
from ..program.matching import Rules as Rules
from ..program.matching import Weight as Weight
from ..program.matching import follows_values as follows_values
from ..program.ops import StaysFloat as StaysFloat
from ..program.record import lookup_id as lookup_id
from ..program.sites import SIDES as SIDES
from ..program.sites import Site as Site
from ..program.sites import short as short
from ..rules.rule import Adaptable as Adaptable
from ..rules.rule import Sparsity as Sparsity
from ..rules.rule import kept as kept

# One operation, quantized.
from ..run.contraction import Hows as Hows
from ..run.contraction import Operands as Operands
from ..run.contraction import infer as infer
from ..run.contraction import inference as inference
from ..run.contraction import quantized_contraction as quantized_contraction
from ..run.contraction import run_operands as run_operands
from ..run.contraction import taking_stored as taking_stored
from ..run.static.statistics import Statistics as Statistics
from ..run.static.statistics import calibrations as calibrations
from ..run.static.statistics import key_of as key_of
from ..run.static.statistics import read as read
from ..tables import LEAST as LEAST
from ..tables import fold_lines as fold_lines
from ..tables import fold_rows as fold_rows
from ..tables import folded as folded
from ..tables import table as table
