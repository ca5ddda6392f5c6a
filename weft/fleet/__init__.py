"""Several engines behind one front: members, the choice between them, and the wire to those on other machines."""
