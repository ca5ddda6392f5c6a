"""Every operation as its definition: a loop or a few lines of PyTorch, on any device and in any dtype.

The oracle of all tests, and what a GPU without kernels of its own runs on. Nothing here is fast, and nothing here waits
for a device: what a loop runs over are the plan's own numbers, on the host.
"""
