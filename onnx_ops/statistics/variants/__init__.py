"""Choose variants: the next step of a search, and the variant that serves a target."""
