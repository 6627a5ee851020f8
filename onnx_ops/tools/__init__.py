"""Inspect, compare, benchmark, quantize and judge single files, without a pipeline."""
