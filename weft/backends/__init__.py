"""An engine as the server sees it: requests go in, answers come out, wherever the engine runs. No torch."""
