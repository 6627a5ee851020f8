"""The rules of the gates, one module a kind."""
