"""The endpoints of OpenAI's API, and what vLLM adds to them."""
