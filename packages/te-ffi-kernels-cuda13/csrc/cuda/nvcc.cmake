# How nvcc compiles the kernels, for the extension module and for their tests on a GPU: these must
# not differ. Subnormal float32 numbers count as zero, as on XLA's threads on CPU, and nothing is
# rounded once where references round twice.
set(JAXTAP_NVCC_FLAGS -ftz=true -prec-div=true -fmad=false --expt-relaxed-constexpr)
