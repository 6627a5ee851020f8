"""The rules of the gates, one module a kind: what a gate says about evidence, with the figures that led to it."""
