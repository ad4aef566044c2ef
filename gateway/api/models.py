"""GET /v1/models, and the check of the model that a request names."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from gateway.api.errors import ApiError


def model_card(name: str, created: int, max_model_len: int) -> dict[str, Any]:
    """Returns the description of a model: the fields of OpenAI's API, vLLM's `max_model_len`, and Anthropic's fields.

    created  seconds since 1970
    """
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "quire",
        "root": name,
        "parent": None,
        "max_model_len": max_model_len,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat(),
    }


def model_list(cards: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the list of all models, which is the only page of Anthropic's pages."""
    ids = [card["id"] for card in cards] or [None]
    return {"object": "list", "data": cards, "has_more": False, "first_id": ids[0], "last_id": ids[-1]}


def check_model(model: str, served: Sequence[str]) -> None:
    """Raises ApiError unless the model is served. An empty name stands for the model that is."""
    if model and model not in served:
        raise unknown_model(model)


def unknown_model(model: str) -> ApiError:
    shown = model if len(model) <= 200 else f"{model[:200]}…"
    message = f"The model `{shown}` does not exist."
    return ApiError(message, status=404, kind="invalid_request_error", code="model_not_found", param="model")
