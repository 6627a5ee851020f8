"""Tools for files without a pipeline: compare, benchmark, quantize, judge."""
