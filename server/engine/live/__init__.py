"""What an engine holds and does at this moment, for GET /v1/live: its state, its blocks and its cached prefixes."""
