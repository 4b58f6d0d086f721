"""Several engines behind one address: which of them serves a request, and how they run on Ray Serve."""
