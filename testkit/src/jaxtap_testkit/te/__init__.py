"""References for te-ffi-kernels' ops, in NumPy and float64."""
