"""Whether the gates keep what they promise, one module a gate."""
