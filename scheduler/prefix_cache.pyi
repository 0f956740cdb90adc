"""Which blocks of the KV cache hold which prefixes of sequences."""

class PrefixCache:
    """Map from a prefix (cache salt, tokens) to the block that holds the keys and values of its last tokens.

    Cached blocks form a tree: a block is known by the block before it, its own tokens and, when it is the first, the
    salt. All of these are compared on a hit; the hash only says where to look, so equal hashes can never lead to the
    block of another prefix. A parent must stay as long as it has children, which is why its number can stand for its
    whole prefix.

    The hash of a block is SipHash-2-4-128 of its parent's hash and its tokens; before the first block comes the hash of
    the salt.

    Attributes:
        num_blocks: of the KV cache.
        block_size: tokens per block.
        num_cached: blocks in the cache.
        hash_mask: applied to both words of every hash. Tests clear it to make all hashes collide.
    """

    num_blocks: int
    block_size: int
    num_cached: int
    hash_mask: int

    def __init__(self, num_blocks: int, block_size: int, key: bytes) -> None: ...
