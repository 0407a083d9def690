"""The public names, and the modules that they are from."""

from typing import Any

from . import reference as reference
from ._stages import Stages as Stages
from ._stages import isa as isa
from ._stages import isas as isas
from ._stages import stages as stages
from ._stages import targets as targets
from ._stages import warm_counts as warm_counts
from ._warmup import export_checks as export_checks
from ._warmup import register as register
from ._warmup import warmup as warmup
from .activations.config import ActivationEnum as ActivationEnum
from .activations.config import ActivationParams as ActivationParams
from .activations.config import ClampedSwigluParams as ClampedSwigluParams
from .activations.op import act_lu as act_lu
from .activations.op import activation as activation
from .activations.op import dact_lu as dact_lu
from .activations.op import quantize_dact_dbias as quantize_dact_dbias
from .attention.op import fused_attn as fused_attn
from .attention.op import fused_attn_bwd as fused_attn_bwd
from .attention.op import fused_attn_fwd as fused_attn_fwd
from .attention.sequence import SequenceDescriptor as SequenceDescriptor
from .attention.types import AttnBiasType as AttnBiasType
from .attention.types import AttnMaskType as AttnMaskType
from .attention.types import AttnSoftmaxType as AttnSoftmaxType
from .attention.types import QKVLayout as QKVLayout
from .convolution.op import conv_w4a8 as conv_w4a8
from .convolution.op import conv_w4a16 as conv_w4a16
from .convolution.op import conv_w8a8 as conv_w8a8
from .convolution.op import conv_w8a16 as conv_w8a16
from .decode.op import decode_attention as decode_attention
from .fake_quantization.op import fake_quantize as fake_quantize
from .grouped_matmul.op import grouped_dense as grouped_dense
from .grouped_matmul.op import grouped_gemm_v2 as grouped_gemm_v2
from .matmul.gemm import gemm as gemm
from .matmul.op import gemm_v2 as gemm_v2
from .norms.op import layernorm as layernorm
from .norms.op import normalization_bwd as normalization_bwd
from .norms.op import normalization_fwd as normalization_fwd
from .op import reference_ops as reference_ops
from .packed_weights.op import gemm_w4a8 as gemm_w4a8
from .packed_weights.op import gemm_w4a16 as gemm_w4a16
from .packed_weights.op import gemm_w8a8 as gemm_w8a8
from .packed_weights.op import gemm_w8a16 as gemm_w8a16
from .packed_weights.pack import pack_w4 as pack_w4
from .packed_weights.pack import pack_w8 as pack_w8
from .packed_weights.take import packed_take as packed_take
from .packed_weights.weight import PackedWeight as PackedWeight
from .permutation.op import token_combine as token_combine
from .permutation.op import token_dispatch as token_dispatch
from .quantize.dequantize import dequantize as dequantize
from .quantize.grouped import grouped_quantize as grouped_quantize
from .quantize.grouped import grouped_quantize_v2 as grouped_quantize_v2
from .quantize.modes import QuantizeLayout as QuantizeLayout
from .quantize.modes import ScalingMode as ScalingMode
from .quantize.modes import compute_scale_from_amax as compute_scale_from_amax
from .quantize.op import dbias_quantize as dbias_quantize
from .router.config import RoutingMapFormat as RoutingMapFormat
from .router.config import ScoreFunction as ScoreFunction
from .router.loss import fused_moe_aux_loss as fused_moe_aux_loss
from .router.loss import fused_moe_aux_loss_bwd as fused_moe_aux_loss_bwd
from .router.loss import fused_moe_aux_loss_fwd as fused_moe_aux_loss_fwd
from .router.op import fused_topk_with_score_function as fused_topk_with_score_function
from .router.op import fused_topk_with_score_function_bwd as fused_topk_with_score_function_bwd
from .router.op import fused_topk_with_score_function_fwd as fused_topk_with_score_function_fwd
from .router.topk import topk as topk
from .scaled_softmax.config import SoftmaxFusionType as SoftmaxFusionType
from .scaled_softmax.op import scaled_masked_softmax_bwd as scaled_masked_softmax_bwd
from .scaled_softmax.op import scaled_masked_softmax_fwd as scaled_masked_softmax_fwd
from .scaled_softmax.op import scaled_softmax_bwd as scaled_softmax_bwd
from .scaled_softmax.op import scaled_softmax_fwd as scaled_softmax_fwd
from .scaled_softmax.op import (
    scaled_upper_triang_masked_softmax_bwd as scaled_upper_triang_masked_softmax_bwd,
)
from .scaled_softmax.op import (
    scaled_upper_triang_masked_softmax_fwd as scaled_upper_triang_masked_softmax_fwd,
)
from .scaled_softmax.op import softmax as softmax
from .training.dot import dot_int8 as dot_int8
from .training.op import quantize_int8 as quantize_int8

_native: Any
__version__: str
