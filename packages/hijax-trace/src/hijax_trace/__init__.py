"""hijax-trace: high-level JAX types, Box, and the engine that taps primitives under jit."""
