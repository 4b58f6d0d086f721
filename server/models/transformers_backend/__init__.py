"""Models that transformers computes, with kvmux's attention and its stores of states in them."""
