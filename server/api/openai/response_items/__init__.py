"""OpenAI's Responses API, without stored responses: a chat in another form."""
