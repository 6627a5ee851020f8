"""gRPC for clients: the Open Inference Protocol, health and reflection.

It needs the extra `grpc`.
"""
