"""Export: from a function and its statistics to a verified .tflite."""
