"""What the endpoint server shares with its clients."""
