"""Bind files, settings and options to frozen values.

Binding is strict, and reports the position of every problem.
"""
