"""A small asynchronous HTTP client for a running SGLang server; the standard library only. Shared by the SGLang examples.

One [`Client`] keeps connections alive and reuses them, so that thousands of requests a second cost little of one core.
"""

import asyncio
import json
from urllib.parse import urlsplit


class Refused(RuntimeError):
    """The server answered with an error status.

    Args:
        status: HTTP status.
        text: the beginning of the body.
    """

    def __init__(self, status: int, text: str):
        super().__init__(f"status {status}: {text}")
        self.status, self.text = status, text


class Client:
    """Requests to one server, any number at a time.

    Args:
        url: `http://host:port`.
        timeout: seconds for one answer.
    """

    def __init__(self, url: str, timeout: float = 600.0):
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"url must look like http://host:port, got {url!r}")
        self.url, self.host, self.port, self.timeout = url.rstrip("/"), parts.hostname, parts.port or 80, timeout
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection of the caller's own."""
        return await asyncio.open_connection(self.host, self.port, limit=2**24)

    def head(self, method: str, path: str, length: int) -> bytes:
        """A request's head for a JSON body of `length` bytes."""
        return (
            f"{method} {path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
        ).encode()

    async def raw(self, method: str, path: str, data: bytes = b"") -> tuple[int, bytes]:
        """Sends a body as it is; returns status and body of the answer.

        Raises:
            OSError: no connection, or it broke.
            TimeoutError: no answer in time.
        """
        while True:
            reused = bool(self._idle)
            reader, writer = self._idle.pop() if reused else await self.connect()
            try:
                writer.write(self.head(method, path, len(data)) + data)
                async with asyncio.timeout(self.timeout):
                    status, body, stays = await read_answer(reader)
            except (ConnectionError, asyncio.IncompleteReadError) as error:
                writer.close()
                if reused:
                    continue  # the server had closed it meanwhile: once more on a new one
                raise ConnectionError(f"{self.url}{path}: {type(error).__name__}: {error}") from error
            except BaseException:
                writer.close()
                raise
            self._idle.append((reader, writer)) if stays else writer.close()
            return status, body

    async def json(self, path: str, body=None, method: str | None = None):
        """The JSON answer to a JSON body (None: a GET); None if the answer has no body.

        Raises:
            Refused: a status other than 2xx.
            OSError: no answer.
        """
        data = b"" if body is None else json.dumps(body).encode()
        status, text = await self.raw(method or ("GET" if body is None else "POST"), path, data)
        if not 200 <= status < 300:
            raise Refused(status, text.decode(errors="replace")[:500])
        try:
            return json.loads(text) if text.strip() else None
        except json.JSONDecodeError:
            return text.decode(errors="replace")

    async def generate(self, input_ids, sampling_params, **fields):
        """SGLang's native `/generate`: one prompt of token ids, or a list of them."""
        return await self.json("/generate", {"input_ids": input_ids, "sampling_params": sampling_params, **fields})

    def close(self) -> None:
        while self._idle:
            self._idle.pop()[1].close()


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes, bool]:
    """Status, body, and whether the connection may be used again.

    Raises:
        ConnectionError: the answer is cut off or is not HTTP.
    """
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    try:
        status = int(head[0].split()[1])
    except (IndexError, ValueError):
        raise ConnectionError(f"not an HTTP answer: {head[0][:80]!r}") from None
    fields = dict(line.lower().split(":", 1) for line in head[1:] if ":" in line)
    stays = fields.get("connection", "").strip() != "close"
    if "chunked" in fields.get("transfer-encoding", ""):
        parts = []
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            parts.append(await reader.readexactly(size))
            await reader.readexactly(2)
        await reader.readuntil(b"\r\n")
        return status, b"".join(parts), stays
    if "content-length" in fields:
        return status, await reader.readexactly(int(fields["content-length"])), stays
    if status in (204, 304):
        return status, b"", stays
    return status, await reader.read(), False
