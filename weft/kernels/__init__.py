"""Operations on packed batches: each a readable PyTorch reference in `extend` form."""
