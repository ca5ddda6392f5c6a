"""`weft trace`: what a server's requests and steps do, as a file for trace viewers."""
