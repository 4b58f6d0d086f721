"""The page at /ui: static files, which show what the documented routes of the server return."""
