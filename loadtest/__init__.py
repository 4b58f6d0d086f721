"""Load for any OpenAI-compatible server. Speaks HTTP only, and imports nothing of ours but itself."""
