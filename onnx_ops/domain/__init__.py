"""Domain types: frozen values with no behaviour beyond their own rules.

Apart from `annotated_types`, the modules import the standard library only.
"""
