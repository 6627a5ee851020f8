"""Choice of variants: the next search step, and the variant to serve on a target."""
