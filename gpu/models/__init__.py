"""Model families. A decoder is written once, in terms of a backend's operations."""
