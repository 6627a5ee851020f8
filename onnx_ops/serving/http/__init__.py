"""HTTP of the public listener: limits, fast path, and Starlette app."""
