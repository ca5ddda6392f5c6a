"""Deciding: who runs, how far, in which step. Touches no tensor; reaches the device through `device.Device`."""
