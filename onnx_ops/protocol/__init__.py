"""What the endpoint server shares with its clients: HTTP messages, server options, the routing table, webhooks."""
