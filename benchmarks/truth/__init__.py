"""Data, models, faults and traffic with a known truth, for checking promises."""
