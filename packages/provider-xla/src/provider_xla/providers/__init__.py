"""Providers: make plans and quantized functions; what a plan can do."""
