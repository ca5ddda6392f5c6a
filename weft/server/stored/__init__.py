"""Answers that the server keeps: responses with memory, and where forks begin."""
