"""The names under which the model is served."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from gateway.api.models import check_model, model_card, unknown_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.schedulers.schedulers import Schedulers
    from quire.v1 import generation_pb2 as pb


class ServedModels:
    """Answers which model a request means. Without names of its own, the gateway asks a scheduler for the name."""

    def __init__(self, schedulers: Schedulers, names: Sequence[str]) -> None:
        self._schedulers = schedulers
        self._names = list(names)
        self._created = int(time.time())

    async def checked(self, model: str, authorization: str) -> str:
        """Returns the name for the answer. Raises ApiError for another model, and QuireError."""
        names = self._names
        if not names:
            info = self._schedulers.info
            if info is None:
                info = await self._schedulers.info_for(authorization)
            names = [info.model_name]
        check_model(model, names)
        return model or names[0]

    async def cards(self, authorization: str) -> list[dict[str, Any]]:
        """Returns the descriptions of all names to a client that may see them. Raises QuireError."""
        info: pb.GetServerInfoResponse = await self._schedulers.info_for(authorization)
        names = self._names or [info.model_name]
        return [model_card(name, self._created, info.max_model_len) for name in names]

    async def card(self, model: str, authorization: str) -> dict[str, Any]:
        """Returns the description of one name. Raises ApiError if it is not served, and QuireError."""
        for card in await self.cards(authorization):
            if card["id"] == model:
                return card
        raise unknown_model(model)
