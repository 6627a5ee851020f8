"""gRPC for clients: the Open Inference Protocol, health and reflection.

The package needs the extra `grpc`.
"""
