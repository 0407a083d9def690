"""Calibration passes: what is done to parameters, with data, before they are rounded."""
