"""What changes a release: promote, reconcile, roll back; and what tells about one: status, history, explain."""
