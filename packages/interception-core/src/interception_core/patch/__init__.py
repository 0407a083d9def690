"""PatchEngine: taps by patching what a program calls."""
