"""Plans on a GPU: CUDA graphs of decode steps, asynchronous uploads and downloads, and the memory budget."""
