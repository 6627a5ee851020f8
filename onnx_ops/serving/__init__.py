"""The endpoint server: the local endpoint's process, and later the container's entry point on every cloud."""
