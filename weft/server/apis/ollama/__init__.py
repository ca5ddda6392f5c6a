"""Ollama's API: bodies, answers and routes. Prompts and answers are those of the chat API."""
