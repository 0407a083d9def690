"""Static ranges: of activations, and in training of parameters and gradients."""
