"""Simulates hours of traffic in seconds: the real planner, memory and policies on a device that only keeps time."""
