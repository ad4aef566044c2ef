"""The version and the features of the plan stream, on which both ends have to agree before the first plan."""

PROTOCOL_VERSION = 2
"""Version of quire.executor.v1. It is increased if an end that does not know a change would do something wrong."""

FEATURES = ("beams", "forks", "logit_changes", "logprobs", "prompt_logprobs")
"""Parts of the protocol that an executor may lack. A part that is added to the protocol gets a name here, so that an
executor that does not know it is refused instead of ignoring its fields."""

OPTIONAL_FEATURES = ("retained_blocks",)
"""Parts that a scheduler can do without: it uses them with an executor that has them."""

DIGEST_BYTES = 32
"""Length of the digest of a block."""
