"""Array proxies: pytrees that travel through a program in place of an array."""
