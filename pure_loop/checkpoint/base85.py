"""Base85 text as bytes, in memory that is that of the bytes: Python's own reader takes thirty times as much."""

from __future__ import annotations

import torch

from pure_loop.checkpoint.container import bytes_of

__all__ = ["decoded"]

_ALPHABET = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_NONE = 255
# Characters at a time.
_CHUNK = 5 << 15


def decoded(text: str) -> bytes:
    """What ``base64.b85decode`` gives.

    Raises:
        ValueError: a character that base85 has not, or five of them that are more than four bytes.

    >>> decoded("VQzUKVtI4")
    b'any byt'
    """
    codes = bytearray(b"\xff" * 256)
    for number, character in enumerate(_ALPHABET):
        codes[character] = number
    content = text.encode("ascii").translate(bytes(codes))
    at = content.find(_NONE)
    if at >= 0:
        raise ValueError(f"bad base85 character at position {at}")
    padding = -len(content) % 5
    weights = torch.tensor([85**4, 85**3, 85**2, 85, 1])
    shifts = torch.tensor([24, 16, 8, 0])
    result = bytearray()
    for start in range(0, len(content), _CHUNK):
        chunk = bytearray(content[start : start + _CHUNK])
        chunk += bytes([84]) * (-len(chunk) % 5)
        numbers = (torch.frombuffer(chunk, dtype=torch.uint8).view(-1, 5) * weights).sum(1)
        if int(numbers.max()) >= 1 << 32:
            raise ValueError(f"base85 overflow in the characters from position {start} on")
        parts = ((numbers.unsqueeze(1) >> shifts) & 255).to(torch.uint8).contiguous()
        result += bytes_of(parts)
    return bytes(memoryview(result)[: len(result) - padding])
