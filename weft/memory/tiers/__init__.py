"""Tiers below the device's memory: what is saved there, what is loaded back, and when that is worth it. No torch."""
