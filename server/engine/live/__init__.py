"""What an engine holds and does at this moment, for GET /v1/live: its state, its pages and its cached prefixes."""
