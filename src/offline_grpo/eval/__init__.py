"""Measures the served policy on held-out problems."""
