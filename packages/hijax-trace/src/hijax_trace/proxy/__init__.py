"""Array proxies: pytrees that travel through a program instead of an array."""
