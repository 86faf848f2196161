"""The keyword arguments of both clients, said once, for readers and type checkers; nothing imports it at run time."""

from collections.abc import Sequence
from typing import Any, TypedDict

from trieton_client.options import Tls


class ClientArguments(TypedDict, total=False):
    """Of `Client(url, protocol, ...)` and `AsyncClient(url, protocol, ...)`.

    Attributes:
        model: name of the served model; "generative_retriever" by default.
        timeout: default deadline of a call in seconds, over all its requests and retries; 10.
        retries: how often a request is repeated, with growing pauses, when the server is away, busy or between
            versions; 3. That is safe because a search changes nothing on the server. Nothing else is repeated: a
            request that failed or ran out of time would only do so again.
        tls: keys for an encrypted connection, or True for the system's; taken from an https:// or grpcs:// url.
        headers: sent with every request, e.g. {"authorization": "Bearer ..."}.
        pool_size: connections over HTTP that are kept open; 16, and 100 for `AsyncClient`.
    """

    model: str
    timeout: float
    retries: int
    tls: Tls | bool | None
    headers: dict[str, str] | None
    pool_size: int


class RetrieveArguments(TypedDict, total=False):
    """Of `retrieve(history, num_results, ...)`.

    Attributes:
        constraint: expression over the version's named sets, e.g. "fresh and not adult": one, or one per history (None
            for a history without). A request has one constraint, so a list of them is sent as several requests, at
            most eight at the same time.
        include: only these items may be returned: one list, or one per history.
        exclude: these items are never returned: one list, or one per history.
        beam_width: prefixes that survive each level; the server's default when None.
        strict: refuse ids that the catalogue does not have, in the history and in both lists. By default they are
            skipped and counted, see `Results.num_unknown`.
        input_ids: raw prompt tokens instead of `history`: one list, or one per prompt.
        timeout: deadline in seconds; the client's default when None.
        headers: of this call, beside those of the client, e.g. {"traceparent": ...}.
        return_errors: give the error of a history in its place of the list, instead of raising the first one. The error
            of a whole request stands in the place of each of its histories.
    """

    constraint: str | Sequence[str | None] | None
    include: Any
    exclude: Any
    beam_width: int | None
    strict: bool
    input_ids: Any
    timeout: float | None
    headers: dict[str, str] | None
    return_errors: bool
