"""Messages, files and checks that servers share with their clients."""
