"""What can go wrong through no fault of Weft's own. A message says what, which value, and what to do."""


class WeftError(Exception):
    """The root of all errors that Weft raises on purpose."""


class OptionError(WeftError):
    """An option of the engine has a value that cannot work."""


class RequestError(WeftError):
    """A request cannot be served as asked; nothing else is affected."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class ModelError(WeftError):
    """A checkpoint or configuration cannot be loaded."""


class EngineStopped(WeftError):
    """The engine has stopped; the request was not (wholly) answered."""
