"""Providers: what users make a plan with, and what a plan can do."""
