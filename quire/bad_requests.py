"""Keeps requests that aiohttp cannot parse out of the log: it quotes their bytes, which can be keys and prompts."""

import logging

from aiohttp.http_exceptions import HttpProcessingError


def ignore_bad_requests() -> None:
    """Drops the records of aiohttp's servers about such requests, each of which has a traceback."""
    logging.getLogger("aiohttp.server").addFilter(_is_no_bad_request)


def _is_no_bad_request(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError)
