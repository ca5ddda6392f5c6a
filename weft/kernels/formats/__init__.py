"""How matrices are stored: a file for each format, and the rules by which a checkpoint's tensors are read as one."""
