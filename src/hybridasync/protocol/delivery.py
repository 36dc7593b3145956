"""Did it happen? What a failed HTTP call proves about the request (R60, R61).

The one question that matters after a failed pause is whether the engine may be paused now. Three answers exist:

* `not_sent`: no connection was ever made, so nothing can have been done and nothing has to be undone;
* `rejected`: the server read the request and refused it, so nothing was done;
* `unknown`: the request may have left. It may even be carried out later, after we gave up.

Exceptions are known by class *name*, along their method resolution order, so that this table needs no HTTP library.
Whatever isn't in the table is `unknown`: an error that nobody thought of must lead to a resume, not to a frozen engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from hybridasync.errors import EngineError, NotSent, Rejected

Delivery = Literal["not_sent", "rejected", "unknown"]

# Names of httpx exceptions. A reset after the connect, a timeout while reading and a broken answer prove nothing.
EXCEPTIONS: Mapping[str, Delivery] = MappingProxyType(
    {
        "ConnectError": "not_sent",
        "ConnectTimeout": "not_sent",
        "PoolTimeout": "not_sent",
        "UnsupportedProtocol": "not_sent",
        "InvalidURL": "not_sent",
        "LocalProtocolError": "not_sent",
        "ReadTimeout": "unknown",
        "ReadError": "unknown",
        "WriteTimeout": "unknown",
        "WriteError": "unknown",
        "CloseError": "unknown",
        "RemoteProtocolError": "unknown",
        "DecodingError": "unknown",
        "ProxyError": "unknown",
        "TooManyRedirects": "unknown",
    }
)

# A 4xx says that the server refused, with one exception: 408 is a server that gave up waiting in the middle.
AMBIGUOUS_CLIENT_STATUSES = frozenset({408})


def classify_exception(exception: BaseException) -> Delivery:
    """What `exception`, raised while sending a request or reading its answer, proves about its delivery."""
    for cls in type(exception).__mro__:
        if cls.__name__ in EXCEPTIONS:
            return EXCEPTIONS[cls.__name__]
    return "unknown"


def classify_status(status: int) -> Delivery | None:
    """What an HTTP status proves; None for a success (2xx)."""
    if 200 <= status < 300:
        return None
    if 400 <= status < 500 and status not in AMBIGUOUS_CLIENT_STATUSES:
        return "rejected"
    return "unknown"


def may_have_happened(error: EngineError) -> bool:
    """Whether what `error` reports about has to be undone (R60). An answer that can't be read is no proof either."""
    return not isinstance(error, NotSent | Rejected)
