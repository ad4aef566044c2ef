"""GET /v1/models, and the check of the model that a request names."""

from collections.abc import Sequence
from typing import Any

from gateway.api.errors import ApiError


def model_card(name: str, created: int, max_model_len: int) -> dict[str, Any]:
    """Returns the description of a model. `max_model_len` is as in vLLM."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "quire",
        "root": name,
        "parent": None,
        "max_model_len": max_model_len,
    }


def check_model(model: str, served: Sequence[str]) -> None:
    """Raises ApiError unless the model is served. An empty name stands for the model that is."""
    if model and model not in served:
        raise unknown_model(model)


def unknown_model(model: str) -> ApiError:
    shown = model if len(model) <= 200 else f"{model[:200]}…"
    message = f"The model `{shown}` does not exist."
    return ApiError(message, status=404, kind="invalid_request_error", code="model_not_found", param="model")
