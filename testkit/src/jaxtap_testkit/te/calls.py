"""The calls of kernels in a compiled program: with sharding, of what each device has."""


def calls(compiled, op=""):
    """Return the lines of a program that call the op; without one, any op."""
    target = f'custom_call_target="te_ffi_kernels.{op}' + ('"' if op else "")
    return [line for line in compiled.as_text().splitlines() if target in line]


def assert_block(compiled, op, block, case=""):
    """Check that the program calls the op once, and that one of its arrays is of this type."""
    found = calls(compiled, op)
    assert len(found) == 1, (op, case, found)
    assert block in found[0], (op, case, block, found[0])
