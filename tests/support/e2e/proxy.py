"""A TCP proxy that simulates the network between scheduler and executor, and that can be cut and stalled."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Proxy:
    """Forwards connections from `address` to `target` ("host:port") on its own thread.

    A method returns when its effect has taken place. `target` may be changed; new connections then go there.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self.address = ""
        self.num_accepted = 0
        self._refuses = False
        self._flows = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._run(self._start())

    def cut(self) -> None:
        """Breaks all connections; new ones are accepted."""
        self._call(self._abort_all)

    def refuse(self) -> None:
        """Breaks all connections, and breaks new ones immediately."""
        self._refuses = True
        self.cut()

    def accept(self) -> None:
        """Accepts connections again after `refuse`."""
        self._refuses = False

    def stall(self) -> None:
        """Stops forwarding data but keeps the connections."""
        self._call(self._flows.clear)

    def resume(self) -> None:
        """Forwards data again after `stall`, including the data that was held back."""
        self._call(self._flows.set)

    def close(self) -> None:
        if self._thread.is_alive():
            self._run(self._close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _start(self) -> None:
        self._flows.set()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _close(self) -> None:
        self._server.close()
        self._abort_all()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_accepted += 1
        self._writers.add(writer)
        host, _, port = self.target.rpartition(":")
        try:
            if self._refuses:
                return
            to_reader, to_writer = await asyncio.open_connection(host, int(port))
            self._writers.add(to_writer)
            try:
                forwards = {
                    asyncio.ensure_future(self._forward(reader, to_writer)),
                    asyncio.ensure_future(self._forward(to_reader, writer)),
                }
                await asyncio.wait(forwards, return_when=asyncio.FIRST_COMPLETED)
                for forward in forwards:
                    forward.cancel()
            finally:
                self._writers.discard(to_writer)
                to_writer.transport.abort()
        except (OSError, asyncio.CancelledError):
            pass  # no server listens at the target, or the proxy closes: the client sees its connection end
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                await self._flows.wait()
                writer.write(data)
                await writer.drain()
        except OSError:
            pass  # one side is gone; the caller closes the other one

    def _abort_all(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30.0)

    def _call(self, function: Callable[[], None]) -> None:
        async def call() -> None:
            function()

        self._run(call())
