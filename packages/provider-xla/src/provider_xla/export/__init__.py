"""Export: a program with its kernels in a file, for processes that serve it."""
