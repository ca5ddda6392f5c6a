"""Errors that Weft raises on purpose. A message says what must hold, what was given, and what to do."""


class CopyFailed(Exception):
    """Copies between tiers could not be made; what they would have written is not to be used."""


class WeftError(Exception):
    """Root of all errors that Weft raises on purpose."""


class OptionError(WeftError):
    """An option has a value that cannot work."""


class InvalidOption(OptionError):
    """An option has a value that cannot work. `option` is its name; the message is the name and the complaint.

    >>> error = InvalidOption("max_tokens", "must be at least 1, got 0")
    >>> str(error), error.option, error.complaint
    ('max_tokens must be at least 1, got 0', 'max_tokens', 'must be at least 1, got 0')
    """

    def __init__(self, option: str, complaint: str) -> None:
        super().__init__(f"{option} {complaint}")
        self.option = option
        self.complaint = complaint


class RequestError(WeftError):
    """A request cannot be served as sent; other requests are not affected.

    `field` is the field at fault, if a single one is; `code` is a machine-readable reason, if there is one.
    """

    def __init__(self, message: str, status: int = 400, *, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.field = field
        self.code = code

    @property
    def complaint(self) -> str:
        """The message without the name of the field that it starts with."""
        return str(self).removeprefix(f"{self.field} ")


class InvalidField(RequestError):
    """A field has a value that cannot be served. The message is its name and the complaint.

    >>> error = InvalidField("top_p", "must be at most 1")
    >>> str(error), error.field, error.complaint
    ('top_p must be at most 1', 'top_p', 'must be at most 1')
    """

    def __init__(self, field: str, complaint: str, status: int = 400, code: str | None = None) -> None:
        super().__init__(f"{field} {complaint}", status, field=field, code=code)


class ModelError(WeftError):
    """A checkpoint or configuration cannot be loaded."""


class EngineStopped(WeftError):
    """The engine has stopped before the request was answered completely."""
