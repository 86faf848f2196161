"""Start and stop the real server; check what it needs."""
