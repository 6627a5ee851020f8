"""Explanations of the difference between two values of one step of a system."""
