"""The parts that families are woven from."""
