"""What the ops of te-ffi-kernels must give, in NumPy and float64: independent of the package."""
