"""What the requests of a model do, for clients that watch, and what became of the last ones."""
