"""The programs of the other contestants."""
