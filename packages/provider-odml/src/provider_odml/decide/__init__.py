"""Where tensors are quantized: from a graph and rules to a plan.

Read ``rules``, ``decision`` (what can be decided), then ``decide``, which asks ``fusion`` what is
folded, ``inputs`` and ``outputs`` about operands and results, and notes in ``placed``.
"""
