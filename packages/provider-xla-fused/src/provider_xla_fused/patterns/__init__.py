"""Patterns: functions that programs spell out in several operations, such as attention."""
