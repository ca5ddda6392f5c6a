"""What requests and steps do: the events, and the companion of an engine that notes them while a client watches."""
