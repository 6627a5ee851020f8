"""Choice of variants.

It covers the next step of a search, and the variant that serves a target.
"""
