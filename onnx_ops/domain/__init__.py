"""Domain types: frozen values with no behaviour beyond their own rules. Imports the standard library only."""
