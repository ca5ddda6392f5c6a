"""llama.cpp's own API: /completion, /infill, /props and /slots."""
