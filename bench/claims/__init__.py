"""`quire bench claims`: what others claim of paged KV memory and continuous batching, measured here, with a verdict.

One module a claim; `catalogue` lists them, `runner` measures them, `page` and `evidence` write what came out.
"""
