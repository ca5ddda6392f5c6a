"""From options to a running engine and server: loading, the processes of engine and ranks, and their start."""
