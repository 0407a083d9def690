"""State: programs that update array proxies, such as a KV cache."""
