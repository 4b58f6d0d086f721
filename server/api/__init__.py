"""The HTTP side: OpenAI's API on top of the engine's messages. Imports neither torch nor transformers."""
