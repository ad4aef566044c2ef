"""The details of an error status: a google.rpc.Status in the trailer `grpc-status-details-bin` (AIP-193)."""

from dataclasses import dataclass, field

from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import BadRequest, QuotaFailure, RetryInfo
from google.rpc.status_pb2 import Status

TRAILER = "grpc-status-details-bin"


@dataclass(frozen=True, slots=True)
class StatusDetails:
    """The details of an error beyond its status code and message.

    violations     field → problem, from BadRequest
    retry_after_s  from RetryInfo; None if there is none
    is_quota       it has a QuotaFailure: the limit is one of the caller's tenant
    """

    violations: dict[str, str] = field(default_factory=dict)
    retry_after_s: float | None = None
    is_quota: bool = False


def status_details(trailer: bytes) -> StatusDetails:
    """Parses the trailer. Details that cannot be read, or are of other types, count as absent."""
    violations: dict[str, str] = {}
    retry_after_s: float | None = None
    is_quota = False
    try:
        for packed in Status.FromString(trailer).details:
            if packed.Is(BadRequest.DESCRIPTOR):
                for found in BadRequest.FromString(packed.value).field_violations:
                    earlier = violations.get(found.field)
                    violations[found.field] = f"{earlier}; {found.description}" if earlier else found.description
            elif packed.Is(RetryInfo.DESCRIPTOR):
                retry_after_s = RetryInfo.FromString(packed.value).retry_delay.ToTimedelta().total_seconds()
            elif packed.Is(QuotaFailure.DESCRIPTOR):
                is_quota = True
    except (DecodeError, ValueError, OverflowError):  # a delay may be too long for a timedelta
        pass  # details are optional: the caller still receives the status
    return StatusDetails(violations, retry_after_s, is_quota)
