"""Tools for single files: inspect, compare, benchmark, quantize, judge."""
