"""What the endpoint server and its clients agree on: the published table, admin messages, Open Inference tensors."""
