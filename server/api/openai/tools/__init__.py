"""Tools of chats: how requests define them, and how calls of them are found in a model's text."""
