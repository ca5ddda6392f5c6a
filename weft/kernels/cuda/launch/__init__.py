"""What launches cost the host: kernels found by a short key, compiled ahead, started early."""
