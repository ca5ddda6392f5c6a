"""Scheduling: which sequences run, how far, in which step. Touches no tensor; reaches the device by `device.Device`."""
