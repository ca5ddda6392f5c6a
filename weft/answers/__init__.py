"""Code that the HTTP server and `LLM` share: it builds requests from prompts, and answers from the engine's outputs."""
