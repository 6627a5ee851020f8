"""The rules of the gates, one module per kind."""
