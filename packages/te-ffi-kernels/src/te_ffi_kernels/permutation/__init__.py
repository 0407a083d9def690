"""Moving tokens to their experts and back, after Transformer Engine."""
