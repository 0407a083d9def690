"""jaxtap: quantizes any JAX program without touching its source.

This distribution brings the others: ``pip install "jaxtap[all]"``. What they do is in
``provider_xla``, ``provider_odml``, ``quant_numerics``, ``hijax_trace``, ``interception_core`` and
``te_ffi_kernels``.
"""

from importlib.metadata import version

__version__ = version("jaxtap")
