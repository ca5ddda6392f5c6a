"""Model families: one file each, built from `layers/`, filled by `weights`, found by `registry`."""
