"""Values shared by every part of Weft. Imports no other Weft package and no torch."""
