"""`weft bench`: sends a chosen load to an OpenAI-compatible server and reports throughput and latency."""
