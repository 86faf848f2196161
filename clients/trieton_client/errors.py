"""What can go wrong with a call, and how a server's answer becomes one of these errors."""

from tritonclient.utils import InferenceServerException

NOT_JSON = "the answer is not JSON: is this the HTTP port of a Triton server (usually 8000)?"


class ClientError(OSError):
    """Base of every error of this package; an OSError, as the errors of network clients are.

    Attributes:
        reason: what the server (or the connection) said, without any prefix of this package.
        where: protocol and address of the server, empty for what was refused before anything was sent.
    """

    def __init__(self, reason: str, *, where: str = ""):
        super().__init__(f"{where}: {reason}" if where else reason)
        self.reason = reason
        self.where = where


class InvalidRequestError(ClientError, ValueError):
    """The request cannot be answered as it is: repeating it gives the same error."""


class NotFoundError(ClientError):
    """The server has no such model or version."""


class UnavailableError(ClientError, ConnectionError):
    """Nobody there, queue full, or no version ready. The client has already retried; later may work."""


class DeadlineError(ClientError, TimeoutError):
    """No answer within the call's deadline."""


class ServerError(ClientError):
    """The server failed on this request; its log says why."""


_KINDS: dict[str, type[ClientError]] = {
    "INVALID_ARGUMENT": InvalidRequestError,
    "UNIMPLEMENTED": InvalidRequestError,
    "NOT_FOUND": NotFoundError,
    "UNAVAILABLE": UnavailableError,
    "DEADLINE_EXCEEDED": DeadlineError,
    "CANCELLED": DeadlineError,
    "400": InvalidRequestError,
    "404": NotFoundError,
    "408": DeadlineError,
    "429": UnavailableError,
    "501": InvalidRequestError,
    "502": UnavailableError,
    "503": UnavailableError,
    "504": DeadlineError,
}


def error_from(failure: InferenceServerException, where: str, hint: str = "") -> ClientError:
    """The error of this package that says what `failure` of tritonclient says.

    Args:
        hint: added where nobody was reached or nothing came back, for example the proxy in between.
    """
    status = str(failure.status() or "").removeprefix("StatusCode.")
    kind = _KINDS.get(status, ServerError)
    text = failure.message() or status or "no reason given"
    return kind(text + hint if kind in (UnavailableError, DeadlineError) else text, where=where)


def row_error(text: str, row: int | None) -> ClientError:
    """The error of one row of an answer from its text "STATUS: reason"."""
    status, _, reason = text.partition(": ")
    return _KINDS.get(status, ServerError)(reason if row is None else f"row {row}: {reason}")
