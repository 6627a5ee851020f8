"""Compare the endpoint server with others in one interleaved run.

All of them run on one machine. The entry point is `python -m benchmarks.serving`.
"""
