"""What a store has as a round's verdict: its length, a blank, "-", code and message where the round failed, else
something else; then whatever the next round put behind it."""

from __future__ import annotations

from shardow import errors


def failure(code: str, message: str) -> bytes:
    return f"-{code} {message}".encode(errors="replace")


def framed(body: bytes) -> bytes:
    return b"%d " % len(body) + body


def body_of(said: bytes) -> bytes:
    """Without what the next round put behind it."""
    length, _, rest = said.partition(b" ")
    return rest[: int(length)]


def is_good(said: bytes) -> bool:
    return not body_of(said).startswith(b"-")


def as_given(said: bytes) -> bytes:
    return framed(body_of(said))


def raise_for(said: bytes) -> None:
    body = body_of(said)
    if body.startswith(b"-"):
        code, _, message = body[1:].decode().partition(" ")
        raise errors.make(code, message)
