"""The verified caller of a call: a name, a tenant, and roles."""

from __future__ import annotations

import re
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum

DEFAULT_TENANT = "default"

# Reasons for which a call is refused, by the names of gRPC's statuses.
UNAUTHENTICATED = "unauthenticated"
PERMISSION_DENIED = "permission_denied"
UNAVAILABLE = "unavailable"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@:/-]{0,127}")


class Role(Enum):
    """A right that calls need (`scheduler.identity.permissions`). An admin may make all calls."""

    GENERATE = "generate"
    OBSERVE = "observe"
    ADMIN = "admin"


class Unauthenticated(Exception):
    """The caller has sent no credentials, or credentials that are not valid. The message never contains them.

    reason  UNAUTHENTICATED, or UNAVAILABLE if the credentials cannot be verified at present
    """

    def __init__(self, why: str, reason: str = UNAUTHENTICATED) -> None:
        super().__init__(why)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller. `name` and `tenant` are safe to log and to use as a metric's label."""

    name: str
    tenant: str
    roles: frozenset[Role]

    def may(self, allowed: frozenset[Role]) -> bool:
        """Returns true if one of the roles is among `allowed`, or is that of an admin."""
        return not self.roles.isdisjoint(allowed) or Role.ADMIN in self.roles


ANONYMOUS = Identity("anonymous", DEFAULT_TENANT, frozenset({Role.GENERATE, Role.OBSERVE}))
"""Every caller, where no identity is configured."""

LOCAL = Identity("local", DEFAULT_TENANT, frozenset({Role.ADMIN}))
"""A caller that could open a Unix socket of the scheduler, at the admin or the local address: its own user."""

CALLER: ContextVar[Identity] = ContextVar("caller")
"""The caller of the call that this task serves. The servers set it before any handler runs."""


def is_name(text: object) -> bool:
    """Returns true if the text can be a name or a tenant: short, printable ASCII, without spaces and quotes."""
    return isinstance(text, str) and _NAME.fullmatch(text) is not None
