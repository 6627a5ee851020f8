"""Search for variants, build their trials, and check the answers of a new variant."""
