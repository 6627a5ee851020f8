"""Domain types: frozen values with no behaviour beyond their own rules.

Of other packages, the modules import only `annotated_types` when they are loaded.
"""
