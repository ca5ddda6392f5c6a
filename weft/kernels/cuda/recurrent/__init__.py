"""What all recurrent kernels share: where a row stands on the grid, and the states at it."""
