"""HTTP listeners: limits of connections, the protocol, routes and pages."""
