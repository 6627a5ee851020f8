"""Domain types: frozen values with no behaviour beyond their own rules.

Of third-party packages, the modules import only `annotated_types` when they are loaded.
"""
