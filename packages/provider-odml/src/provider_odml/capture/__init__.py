"""What a program does: its operations and tensors, found in one abstract run.

Read ``ops`` (what is tapped), ``graph`` (what is found), then ``survey``. ``module_calls`` and
``vmapped`` prepare a program, so that modules and mapped functions show as on the device.
"""
