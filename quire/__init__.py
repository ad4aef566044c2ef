"""The client library: streams completions from a Quire server.

with quire.Client() as client:
    for event in client.generate("Once upon a time", max_tokens=64):
        if isinstance(event, quire.Delta):
            print(event.text, end="", flush=True)

The folder also has what the services share, such as logs, addresses and TLS, the generated stubs, and the command line.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.async_client import AsyncClient, AsyncEventStream
    from quire.block_map import (
        Block,
        BlockMap,
        BlockState,
        PoolSummary,
        RunningSequence,
        ServerInfo,
        ServerState,
        Sharing,
        StepTrace,
        Waste,
    )
    from quire.client import Client, EventStream
    from quire.errors import (
        CapacityExceededError,
        DeadlineExceededError,
        InternalError,
        InvalidRequestError,
        LimitExceededError,
        OtherModelError,
        PermissionDeniedError,
        QueueFullError,
        QuireError,
        RequestCancelledError,
        UnauthenticatedError,
        UnavailableError,
    )
    from quire.events import (
        ChatMessage,
        ChatMessageDict,
        CompletedSequence,
        Completion,
        Delta,
        Event,
        Finished,
        FinishReason,
        Prompt,
        PromptLogprobs,
        Started,
        TokenLogprob,
        TokenLogprobs,
        Usage,
    )
    from quire.options import GenerateOptions
    from quire.tls import TlsError, TlsFiles

__all__ = [
    "AsyncClient",
    "AsyncEventStream",
    "Block",
    "BlockMap",
    "BlockState",
    "CapacityExceededError",
    "ChatMessage",
    "ChatMessageDict",
    "Client",
    "CompletedSequence",
    "Completion",
    "DeadlineExceededError",
    "Delta",
    "Event",
    "EventStream",
    "FinishReason",
    "Finished",
    "GenerateOptions",
    "InternalError",
    "InvalidRequestError",
    "LimitExceededError",
    "OtherModelError",
    "PermissionDeniedError",
    "PoolSummary",
    "Prompt",
    "PromptLogprobs",
    "QueueFullError",
    "QuireError",
    "RequestCancelledError",
    "RunningSequence",
    "ServerInfo",
    "ServerState",
    "Sharing",
    "Started",
    "StepTrace",
    "TlsError",
    "TlsFiles",
    "TokenLogprob",
    "TokenLogprobs",
    "UnauthenticatedError",
    "UnavailableError",
    "Usage",
    "Waste",
]

_MODULES = ("async_client", "block_map", "client", "errors", "events", "options", "tls")


def __getattr__(name: str) -> Any:
    """Imports the client library at its first use: the command line imports this package before it handles Ctrl-C."""
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    modules = (import_module(f"{__name__}.{module}") for module in _MODULES)
    globals()[name] = found = next(getattr(module, name) for module in modules if hasattr(module, name))
    return found
