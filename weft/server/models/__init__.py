"""Several models in one server: their names, which of them are loaded, and how a request reaches its own."""
