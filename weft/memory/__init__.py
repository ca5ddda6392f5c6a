"""The core of Weft: who owns which bytes, what is cached, and where a sequence may resume. No torch."""
