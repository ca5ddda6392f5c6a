"""The heart of Weft: which bytes belong to whom, what is remembered, and where a sequence may resume. No torch."""
