"""Plans on a GPU: recorded decode steps, uploads and downloads that nobody waits for, and how much memory there is."""
