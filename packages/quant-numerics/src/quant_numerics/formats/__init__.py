"""Number formats: what quantized values stand for, and how numbers become them."""
