"""How the work of the kernel over pages, `models.paged_triton`, is cut."""

from typing import NamedTuple

LEAST_QUERIES = 16  # rows of a tensor core's product
MOST_QUERIES = 32  # heads that share keys and are computed at once
LEAST_WIDTH = 16  # dimensions of a tensor core's product
BLOCK = 64  # tokens of keys and values on the chip at once; fewer of wide ones
BLOCK_BYTES = 65536  # of a block's keys and values at most
PROGRAMS = 528  # wanted at least: four for each of 132 multiprocessors
LEAST_SPLIT = 128  # tokens
MOST_SPLIT = 1024


class Blocks(NamedTuple):
    """How the work of the kernel is cut.

    Attributes:
        queries: heads that one program computes, of those that share keys; the rest is padding.
        pages: that are read at once; a power of two.
        per_split: pages that one program reads; a multiple of `pages`.
        splits: parts into which a sequence's pages are cut.
    """

    queries: int
    pages: int
    per_split: int
    splits: int


def choose_blocks(programs: int, shared: int, token: int, page: int, pages: int) -> Blocks:
    """Choose how the work is cut.

    Sequences are split so far that there are `PROGRAMS` programs, and so far that none reads more
    than `MOST_SPLIT` tokens: else the longest sequence would be waited for.

    Args:
        programs: sequences times heads of keys.
        shared: query heads that share a head of keys.
        token: bytes of a token's key and value.
        page: tokens of a page.
        pages: the most pages of a sequence.

    >>> choose_blocks(512, 2, 512, 16, 128)
    Blocks(queries=16, pages=4, per_split=64, splits=2)
    >>> choose_blocks(8, 5, 512, 16, 128)
    Blocks(queries=16, pages=4, per_split=8, splits=16)
    """
    queries = min(max(LEAST_QUERIES, power_of_two(shared)), MOST_QUERIES)
    at_once = max(1, min(BLOCK, BLOCK_BYTES // token) // page)
    at_once = min(power_of_two(at_once + 1) // 2, power_of_two(pages))
    programs *= -(-shared // queries)
    fewest = -(-pages * page // MOST_SPLIT)
    most = max(fewest, pages * page // LEAST_SPLIT)
    splits = min(max(fewest, -(-PROGRAMS // programs)), most)
    per_split = -(-pages // (splits * at_once)) * at_once
    return Blocks(queries, at_once, per_split, -(-pages // per_split))


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is not smaller.

    >>> power_of_two(5), power_of_two(8)
    (8, 8)
    """
    return 1 << max(0, number - 1).bit_length()


def width_parts(width: int) -> tuple[tuple[int, int], ...]:
    """Cut a width into powers of two: start and size of each, as Triton takes no others.

    Raises:
        ValueError: it is not a multiple of `LEAST_WIDTH`.

    >>> width_parts(576), width_parts(80)
    (((0, 512), (512, 64)), ((0, 64), (64, 16)))
    """
    if width % LEAST_WIDTH or width <= 0:
        raise ValueError(f"expected a width that is a multiple of {LEAST_WIDTH}, got {width}")
    sizes = [1 << bit for bit in range(width.bit_length()) if width >> bit & 1][::-1]
    return tuple((sum(sizes[:i]), size) for i, size in enumerate(sizes))
