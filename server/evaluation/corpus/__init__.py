"""Generates documents with known answers: stories, records asked for later, and chats."""
