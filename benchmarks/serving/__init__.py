"""The endpoint server beside others, one interleaved run on one machine. Entry: `python benchmarks/serving.py`."""
