"""The version and the features of the plan stream, on which both ends have to agree before the first plan."""

PROTOCOL_VERSION = 3
"""Version of quire.executor.v1. It is increased if an end that does not know a change would do something wrong."""

LEAST_PROTOCOL_VERSION = 3
"""The oldest version that this release can speak. With a peer of an older version than its own it does what that
version says; so it can be lower than PROTOCOL_VERSION only if the code does so."""

FEATURES = ("beams", "forks", "logit_changes", "logprobs", "prompt_logprobs")
"""Parts of the protocol that an executor may lack. A part that is added to the protocol gets a name here, so that an
executor that does not know it is refused instead of ignoring its fields."""


OPTIONAL_FEATURES = ("retained_blocks",)
"""Parts that a scheduler can do without: it uses them with an executor that has them."""

DIGEST_BYTES = 32
"""Length of the digest of a block."""


def speaks_with(version: int, least: int) -> bool:
    """Returns whether this end and a peer have a version in common. least: the peer's, 0 if it names none."""
    return version >= LEAST_PROTOCOL_VERSION and (least or version) <= PROTOCOL_VERSION


def spoken(version: int, least: int) -> str:
    """Returns the versions of an end for a message."""
    if not version:
        return "version 1 or older"
    return f"version {version}" if least in (0, version) else f"versions {least} to {version}"


OWN = spoken(PROTOCOL_VERSION, LEAST_PROTOCOL_VERSION)
"""The versions of this end, for messages."""
