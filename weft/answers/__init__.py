"""From a prompt to a request, and from the engine's outputs to an answer: what the HTTP server and `LLM` share."""
