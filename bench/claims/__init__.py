"""Published claims about paged KV memory and continuous batching, measured here, with verdicts.

Each claim is a module. `catalogue` lists them, `runner` measures them, `page` and `evidence` write the report.
"""
