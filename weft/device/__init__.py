"""Memory of a device and the ways to it: buffers, one upload and one download a step, copies to host memory."""
