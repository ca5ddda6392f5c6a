"""GPU operations, in Triton and FlashInfer.

Imported only where these operations are chosen, so that nothing else needs Triton.
"""
