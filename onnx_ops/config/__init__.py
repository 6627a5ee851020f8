"""Bind files, settings and options to frozen values.

Binding is strict, and reports all problems with their locations.
"""
