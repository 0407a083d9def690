"""State: a staged program, made again so that it carries array proxies that it updates."""
