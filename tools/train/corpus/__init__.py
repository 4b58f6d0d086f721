"""Generates documents with known answers: stories, records of facts that are asked for later, and chats."""
