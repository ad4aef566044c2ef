"""Remembers the parts of a stream that were received, and builds the request that continues it after a break."""

from array import array
from dataclasses import dataclass, field

from quire.errors import InternalError
from quire.v1 import generation_pb2


@dataclass(slots=True)
class _Received:
    """The token ids of one sequence, 4 bytes each; whether its last Delta and its Finished were received.

    A finished one has no ids: a server needs none, and those of many samples would not fit a message.
    """

    token_ids: "array[int]" = field(default_factory=lambda: array("I"))
    has_last: bool = False
    is_finished: bool = False


class ResumableRequest:
    """A request whose stream may break off. Give it every message of the stream, and send `next_request` after a break.

    It does no I/O and has no clock. docs/protocol.md describes the same rules for programs without this library.
    """

    def __init__(self, request: generation_pb2.GenerateRequest) -> None:
        self._request = generation_pb2.GenerateRequest()
        self._request.CopyFrom(request)
        self._request.resumable = True
        self._has_started = False
        self._is_continued = False
        self._continuation: generation_pb2.Continuation | None = None
        self._sequences: dict[int, _Received] = {}
        # The request itself may continue a stream: of a gateway's client, whose own gateway has died.
        self._num_prompt_logprobs = request.resume.num_prompt_logprobs
        for each in request.resume.sequences:
            token_ids = array("I", () if each.finished else each.token_ids)
            self._sequences[each.index] = _Received(token_ids, has_last=each.has_last, is_finished=each.finished)

    @property
    def can_continue(self) -> bool:
        """False if the server did not say how the stream can be continued, because it is older than this client."""
        return not self._has_started or self._continuation is not None

    def next_request(self) -> generation_pb2.GenerateRequest:
        """Returns the request to send: the first one again if nothing was received, otherwise one for the rest."""
        self._is_continued = self._has_started
        if self._continuation is None:
            return self._request
        request = generation_pb2.GenerateRequest()
        request.CopyFrom(self._request)
        request.ClearField("resume")
        request.resume.continuation.CopyFrom(self._continuation)
        request.resume.num_prompt_logprobs = self._num_prompt_logprobs
        for index, received in sorted(self._sequences.items()):
            request.resume.sequences.add(
                index=index,
                token_ids=received.token_ids,
                has_last=received.has_last,
                finished=received.is_finished,
            )
        return request

    def accept(self, message: generation_pb2.GenerateResponse) -> bool:
        """Adds a message. Returns False if it is the Started of a continued stream, which the caller has had already.

        Raises InternalError if a server begins a stream again that it was asked to continue.
        """
        match message.WhichOneof("event"):
            case "started":
                return self._start(message.started)
            case "prompt_logprobs":
                self._num_prompt_logprobs += len(message.prompt_logprobs.tokens)
            case "delta":
                delta = message.delta
                received = self._sequence(delta.index)
                received.token_ids.extend(delta.token_ids)
                received.has_last = delta.last
            case "finished":
                self._sequences[message.finished.index] = _Received(is_finished=True)
        return True

    def _start(self, started: generation_pb2.Started) -> bool:
        if self._is_continued:
            if not started.HasField("continuation"):
                raise InternalError("the stream broke off, and the server that answers now cannot continue it")
            return False
        self._has_started = True
        if started.HasField("continuation"):
            self._continuation = started.continuation
        return True

    def _sequence(self, index: int) -> _Received:
        received = self._sequences.get(index)
        if received is None:
            received = self._sequences[index] = _Received()
        return received
