"""The endpoint server beside others, one interleaved run on one machine. Entry: `python -m benchmarks.serving`."""
