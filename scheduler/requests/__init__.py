"""A request from its message to its last token: `validation.py` checks it, `intake.py` opens it, `response_stream.py`
carries its output."""
