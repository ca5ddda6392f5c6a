"""Execution of plans: upload, forward pass, sampling. It decides nothing."""
