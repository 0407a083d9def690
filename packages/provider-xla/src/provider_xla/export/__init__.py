"""Export: a program and its kernels in a file, for serving."""
