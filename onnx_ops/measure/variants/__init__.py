"""Find variants: the search, its trials, and a first look at the answers of a new one."""
