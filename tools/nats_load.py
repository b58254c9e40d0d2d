"""Load on a NATS server: publishers, subscribers and requests that are answered, in one process of its own.

Speaks as much of the NATS text protocol as that takes. All of it is closed-loop: a publisher sends its next
burst when the server has taken the last one, a requester its next request when the last one is answered. So
the server is as busy as it may be, and is not flooded. Ends on SIGTERM with one JSON line on what was done.
"""

import asyncio
import json
import signal
import sys
import time
from collections.abc import Callable

PUBLISHERS = 4
SUBSCRIBERS = 8  # each message goes to SUBSCRIBERS / PUBLISHERS of them
REQUESTERS = 48
RESPONDERS = 4
BURST = 50
PAYLOAD = b"x" * 128

Received = Callable[[bytes, bytes], None]  # subject of the answer (empty if none is wanted), payload


class Client(asyncio.Protocol):
    """One connection. ``received`` is called for each message, ``flushed`` whenever the server answers a
    PING."""

    def __init__(self) -> None:
        self.received: Received = lambda _reply, _payload: None
        self.flushed: Callable[[], None] = lambda: None
        self.lost = asyncio.get_running_loop().create_future()
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.send(b'CONNECT {"verbose":false,"pedantic":false}\r\n')

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(exc)

    def send(self, data: bytes) -> None:
        self._transport.write(data)

    def subscribe(self, subject: bytes, *, queue: bytes = b"") -> None:
        self.send(b"SUB %s %s 1\r\n" % (subject, queue))

    def publish(self, subject: bytes, payload: bytes, *, reply: bytes = b"") -> None:
        self.send(b"PUB %s %s %d\r\n%s\r\n" % (subject, reply, len(payload), payload))

    def data_received(self, data: bytes) -> None:
        buffer, at = self._buffer + data, 0
        while (end := buffer.find(b"\r\n", at)) >= 0:
            line = buffer[at:end]
            at_next = end + 2
            if line.startswith(b"MSG "):
                fields = line.split()  # MSG subject sid [reply] size
                at_next += int(fields[-1]) + 2
                if at_next > len(buffer):
                    break
                self.received(fields[3] if len(fields) == 5 else b"", buffer[end + 2 : at_next - 2])
            elif line == b"PING":
                self.send(b"PONG\r\n")
            elif line == b"PONG":
                self.flushed()
            elif line.startswith(b"-ERR"):
                raise RuntimeError(line.decode())
            at = at_next
        self._buffer = buffer[at:]


class Load:
    """All clients, and what they have done so far."""

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self.published = self.delivered = 0
        self.latencies_seconds: list[float] = []
        self._clients: list[Client] = []

    async def start(self) -> None:
        """Connect everyone; subscribers and responders before those who write to them."""
        for number in range(SUBSCRIBERS):
            await self._subscriber(number)
        for _ in range(RESPONDERS):
            await self._responder()
        for number in range(REQUESTERS):
            await self._requester(number)
        for number in range(PUBLISHERS):
            await self._publisher(number)

    async def lost(self) -> None:
        """Returns when a connection is lost."""
        await asyncio.wait([client.lost for client in self._clients], return_when=asyncio.FIRST_COMPLETED)

    async def _connect(self) -> Client:
        _, client = await asyncio.get_running_loop().create_connection(Client, *self._address)
        self._clients.append(client)
        return client

    async def _subscriber(self, number: int) -> None:
        client = await self._connect()

        def count(_reply: bytes, _payload: bytes) -> None:
            self.delivered += 1

        client.received = count
        client.subscribe(b"events.%d" % (number % PUBLISHERS))

    async def _publisher(self, number: int) -> None:
        client = await self._connect()
        message = b"PUB events.%d  %d\r\n%s\r\n" % (number, len(PAYLOAD), PAYLOAD)
        burst = message * BURST + b"PING\r\n"

        def next_burst() -> None:
            self.published += BURST
            client.send(burst)

        client.flushed = next_burst
        next_burst()

    async def _responder(self) -> None:
        client = await self._connect()
        client.received = client.publish
        client.subscribe(b"service", queue=b"workers")

    async def _requester(self, number: int) -> None:
        client = await self._connect()
        inbox = b"_INBOX.%d" % number
        sent = time.perf_counter()

        def answered(_reply: bytes, _payload: bytes) -> None:
            nonlocal sent
            now = time.perf_counter()
            self.latencies_seconds.append(now - sent)
            sent = now
            client.publish(b"service", PAYLOAD, reply=inbox)

        client.received = answered
        client.subscribe(inbox)
        client.publish(b"service", PAYLOAD, reply=inbox)


async def run(host: str, port: int) -> None:
    """Load the server until SIGTERM, then print what was done."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    load = Load(host, port)
    await load.start()
    start = time.perf_counter()
    stopped, lost = asyncio.create_task(stop.wait()), asyncio.create_task(load.lost())
    await asyncio.wait([stopped, lost], return_when=asyncio.FIRST_COMPLETED)
    if lost.done():
        raise ConnectionError(f"the server at {host}:{port} closed a connection")
    lost.cancel()
    seconds = time.perf_counter() - start
    latencies = sorted(load.latencies_seconds) or [0.0]
    done = {
        "messages_per_second": round((load.published + load.delivered) / seconds),
        "requests_per_second": round(len(load.latencies_seconds) / seconds),
        "request_p50_seconds": latencies[len(latencies) // 2],
        "request_p99_seconds": latencies[len(latencies) * 99 // 100],
    }
    print(json.dumps(done), flush=True)


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1], int(sys.argv[2])))
