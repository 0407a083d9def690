"""State: programs that update and return array proxies, such as a quantized KV cache."""
