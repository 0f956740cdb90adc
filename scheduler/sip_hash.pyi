"""SipHash-2-4 with 128 bits of output (Aumasson and Bernstein, "SipHash: a fast short-input PRF", 2012)."""

def sip_hash_128(key: bytes, message: bytes) -> bytes:
    """The 16 bytes that follow from a message and a secret key of 16 bytes.

    Who does not know the key cannot find messages that collide.

    Raises:
        ValueError: the key has another length.
    """
