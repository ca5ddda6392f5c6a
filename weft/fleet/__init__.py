"""Several engines behind one front: which replica holds what, and which one gets the next request."""
