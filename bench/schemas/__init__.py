"""JSON schemas of JSONSchemaBench as grammars: which ones compile, what they accept, and what they cost."""
