"""How much the engine's cache holds: pages for keys and values, slots for states."""

from jaxrl_llm.models.model import Model
from jaxrl_llm.rollout.engine import EngineSettings
from jaxrl_llm.rollout.native.programs import Programs
from jaxrl_llm.rollout.native.sizes import PAGE, Sizes, choose_sizes, count_parts, with_visuals
from jaxrl_llm.sharding.layout import Layout

VISUAL_TOKENS = 8192
"""Of images and videos whose features a part holds at most, if no sequence is longer."""

FEATURES_SHARE = 1 / 8
"""Of the cache that these may take."""

FEWEST_SLOTS = 2
"""Of a part: for a sequence, and for the snapshot that it goes on from."""


def sizes_with_cache(
    model: Model, settings: EngineSettings, layout: Layout, steps: int, *, copies: int
) -> Sizes:
    """Choose the shapes of the programs, with as much as the cache has room for.

    There are two copies of what is cached where pages are gathered into rows, else one.

    A model with states has a slot for each sequence that runs or is kept, and one for the prompt
    that two of them share. Where the cache is too small for all, pages and slots become fewer in
    the same proportion. A model with a vision tower also holds features of images.

    Raises:
        ValueError: the longest sequence has no room.
    """
    running = settings.max_running_sequences
    sizes = choose_sizes(
        parts=count_parts(layout, running),
        max_running_sequences=running,
        max_tokens=settings.max_tokens,
        steps=steps,
    )
    programs = Programs(
        model,
        layout,
        sizes,
        settings.dtype,
        kv_cache_dtype=settings.kv_cache_dtype,
        records_routes=settings.record_routes,
    )
    room = None if settings.cache_gb is None else int(settings.cache_gb * 1e9)
    sizes, visual_bytes = _with_visuals(sizes, programs, settings.max_tokens, room)
    page_bytes, slot_bytes = copies * programs.page_bytes(), copies * programs.slot_bytes()
    kept = running if settings.cache_gb is None else max(running, settings.cached_sequences or 0)
    slots = -(-kept // sizes.parts) + -(-running // (2 * sizes.parts)) if slot_bytes else 0
    if room is None:
        return sizes._replace(slots=slots)
    pages, room = sizes.pages * kept // running, room - visual_bytes
    needed = -(-settings.max_tokens // PAGE) + 1
    if slots:
        share = room / (pages * page_bytes + slots * slot_bytes)
        affordable = (room - needed * page_bytes) // slot_bytes
        slots = max(FEWEST_SLOTS, min(slots, int(slots * share), affordable))
    sizes = sizes._replace(pages=min((room - slots * slot_bytes) // page_bytes, pages), slots=slots)
    if sizes.pages < needed:
        least = needed * page_bytes + (FEWEST_SLOTS * slot_bytes if slots else 0) + visual_bytes
        states = f" and {FEWEST_SLOTS} states of {slot_bytes / copies / 1e6:.3g} MB"
        images = f" and {visual_bytes / 1e6:.3g} MB of features of images"
        raise ValueError(
            f"a cache of {settings.cache_gb} GB holds {max(0, sizes.pages) * PAGE} tokens: "
            f"expected at least {least / 1e9:.3g} GB, for a sequence of {settings.max_tokens} "
            f"tokens{states if slots else ''}{images if visual_bytes else ''}"
        )
    return sizes


def _with_visuals(
    sizes: Sizes, programs: Programs, longest: int, room: int | None
) -> tuple[Sizes, int]:
    """Return shapes with those of a vision tower, and the bytes of its features.

    Those of a sequence have room in any case, more of them take no more than their share.
    """
    if programs.tower is None:
        return sizes, 0
    token_bytes, most = programs.tower.token_bytes, VISUAL_TOKENS
    if room is not None:
        most = min(most, int(FEATURES_SHARE * room) // token_bytes)
    most = min(sizes.rows[-1] // sizes.parts * longest, max(longest, most))
    sizes = with_visuals(sizes, longest * programs.tower.vision.group, most)
    return sizes, most * token_bytes
