"""A program quantized as planned: calibration, training, and the statistics of both."""
