"""Which positions of a sequence a context-parallel rank holds: the load-balanced order of Megatron-core's ring."""


def ring_chunks(width: int, rank: int, size: int) -> list[tuple[int, int]]:
    """Half-open ranges of the `width` positions of a sequence that `rank` of `size` holds, in memory order.

    The sequence, padded up to 2 x size equal chunks, gives rank r chunks r and 2 x size - 1 - r, so that causal
    attention costs every rank the same; the last chunk of a width that is no multiple ends beyond it.
    """
    if size == 1:
        return [(0, width)]
    chunk = -(-width // (2 * size))
    return [(number * chunk, (number + 1) * chunk) for number in (rank, 2 * size - 1 - rank)]
