"""Load tests for any OpenAI-compatible server, over HTTP alone. Imports no other package of this project."""
