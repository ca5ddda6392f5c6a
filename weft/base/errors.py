"""Errors that Weft raises on purpose. A message says what must hold, what was given, and what to do."""


class WeftError(Exception):
    """Root of all errors that Weft raises on purpose."""


class OptionError(WeftError):
    """An option has a value that cannot work."""


class RequestError(WeftError):
    """A request cannot be served as sent; other requests are not affected."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class ModelError(WeftError):
    """A checkpoint or configuration cannot be loaded."""


class EngineStopped(WeftError):
    """The engine has stopped before the request was answered completely."""
