"""The table of all calls: which roles may make which. What is not in the table is refused.

A caller needs one of the roles in the row; an admin may make every call in the table. Calls that are OPEN need no
identity: they are the probes, which tell nothing but a state.
"""

from scheduler.identity.identity import Role

OPEN: frozenset[Role] = frozenset()
_GENERATE = frozenset({Role.GENERATE})
_OBSERVE = frozenset({Role.OBSERVE})
_EITHER = _GENERATE | _OBSERVE
_ADMIN = frozenset({Role.ADMIN})

METHODS = {
    "/quire.v1.Generation/Generate": _GENERATE,
    # Each of its streams needs the role too, of the client that its request names.
    "/quire.v1.Generation/GenerateMany": _GENERATE,
    "/quire.v1.Generation/GetServerInfo": _EITHER,
    "/quire.v1.Tokenization/Tokenize": _GENERATE,
    "/quire.v1.Tokenization/Detokenize": _GENERATE,
    "/quire.v1.Tokenization/GetTokenizerInfo": _EITHER,
    # A router needs them: they tell the load, the digests of cached prompts, and the tenant of a client's key.
    "/quire.v1.Replica/Watch": _OBSERVE,
    "/quire.v1.Replica/Identify": _OBSERVE,
    # These show the ids and the sizes of the requests of all tenants.
    "/quire.v1.Admin/GetBlockMap": _OBSERVE,
    "/quire.v1.Admin/GetStepTrace": _OBSERVE,
    "/quire.v1.Admin/Drain": _ADMIN,
    "/quire.v1.Admin/Resume": _ADMIN,
    "/quire.v1.Admin/ResetPrefixCache": _ADMIN,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _OBSERVE,
    "/grpc.health.v1.Health/Check": OPEN,
    "/grpc.health.v1.Health/Watch": OPEN,
}
"""gRPC methods by their paths."""

ROUTES = {
    ("GET", "/healthz"): OPEN,
    ("GET", "/readyz"): OPEN,
    ("GET", "/metrics"): _OBSERVE,
    ("GET", "/"): _OBSERVE,
    ("GET", "/live/{name}"): _OBSERVE,
    ("GET", "/live/prompt"): _OBSERVE,
    ("GET", "/live/events"): _OBSERVE,
    ("POST", "/live/completions"): _GENERATE,
}
"""HTTP routes by method and path pattern. HEAD is allowed where GET is."""
