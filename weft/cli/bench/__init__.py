"""`weft bench`: requests of a chosen shape against an OpenAI-compatible server, and what came of them in numbers."""
