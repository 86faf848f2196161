"""Publishing bundles into the repository of a running server, and taking them back."""
