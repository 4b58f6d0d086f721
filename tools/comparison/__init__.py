"""`make compare`: measures all strategies under several loads, and says which one suits which load."""
