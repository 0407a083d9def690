"""Patterns: functions that programs write out in several operations, found in the dataflow."""
