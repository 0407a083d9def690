"""``jaxtap demo-xla``: two small models on handwritten digits, in float, int8 and int4."""
