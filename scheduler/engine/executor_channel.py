"""The way to the executor: its address, which may be in a file because it moves, and the settings of the channel."""

import grpc
import grpc.aio

from quire.addresses import is_address
from scheduler.core import ExecutorLost

_MAX_CHARACTERS = 1024

_OPTIONS = [
    # An http_proxy of the environment is for requests to other networks; gRPC would send calls to loopback there too.
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # Detects a peer that vanished without closing its connection in seconds; TCP would take minutes.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # gRPC waits this long for the acknowledgement of data as well; the default is a minute.
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # The engine decides when to reconnect, so gRPC's own backoff must not delay it.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    # Despite its name, this bounds one attempt. On a busy machine a tenth of a second is not enough.
    ("grpc.min_reconnect_backoff_ms", 2_000),
]


def address_in(path: str) -> str:
    """Returns the address in a file. Raises ExecutorLost if there is none."""
    try:
        with open(path, encoding="utf-8") as file:
            address = file.read(_MAX_CHARACTERS).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ExecutorLost(f"the address of the executor cannot be read: {error}") from None
    if not is_address(address):
        raise ExecutorLost(f"{path} holds no address of an executor")
    return address


def open_channel(address: str, credentials: grpc.ChannelCredentials | None, executor_name: str) -> grpc.aio.Channel:
    """Returns a channel. With credentials, the certificate there must have `executor_name`."""
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=_OPTIONS)
    options = [*_OPTIONS, ("grpc.ssl_target_name_override", executor_name)]
    return grpc.aio.secure_channel(address, credentials, options=options)
