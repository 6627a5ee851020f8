"""Protocol between the endpoint server and its clients."""
