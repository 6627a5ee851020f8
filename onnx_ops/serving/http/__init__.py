"""HTTP/1.1 of the public listener: limits, the fast path of inference, and the Starlette app for everything else."""
