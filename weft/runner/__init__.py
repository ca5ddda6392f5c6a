"""Plans into tensors, one forward, and the choice of tokens. Executes; decides nothing."""
