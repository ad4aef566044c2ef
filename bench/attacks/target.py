"""The services that an attack is aimed at."""

from dataclasses import dataclass

import aiohttp

from quire.async_client import AsyncClient


@dataclass(frozen=True, slots=True)
class Target:
    """The addresses of the services, host:port, and the key with which the attacker is known to them, if any."""

    grpc: str
    http: str
    api_key: str | None = None

    def client(self) -> AsyncClient:
        return AsyncClient(self.grpc, api_key=self.api_key, resume_timeout_s=0)

    def session(self) -> aiohttp.ClientSession:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return aiohttp.ClientSession(
            f"http://{self.http}",
            headers=headers,
            timeout=aiohttp.ClientTimeout(30),
            connector=aiohttp.TCPConnector(limit=0),
        )
