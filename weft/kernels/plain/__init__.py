"""Reference definition of every operation: a loop or a few lines of PyTorch, on any device and in any dtype.

It is the oracle of all tests, and the fallback for a GPU without its own kernels. Nothing here is fast, and nothing
here waits for a device: loops run over the plan's own numbers, on the host.
"""
