"""Programs: the operations that rules are about, found and read."""
