"""gRPC for clients: the Open Inference Protocol, health and reflection (extra `grpc`)."""
