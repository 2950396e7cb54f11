"""From the store's frames to a client's socket."""
