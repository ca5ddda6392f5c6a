"""The remote tier: units as objects of a store that engines share."""
