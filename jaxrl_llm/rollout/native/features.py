"""Features of images and videos while prompts are read that hold them."""

from collections import OrderedDict
from collections.abc import Container, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from jaxrl_llm.models.vision.inputs import Visual, VisualFeatures
from jaxrl_llm.models.vision.rows import frame_bounds, patch_rows
from jaxrl_llm.models.vision.spec import VisionSpec
from jaxrl_llm.rollout.native.programs import Programs
from jaxrl_llm.rollout.native.scheduler import SequenceState
from jaxrl_llm.rollout.native.sizes import PATCHES_AT_ONCE
from jaxrl_llm.sharding import distributed


class FeatureSlots:
    """Which slots of one part hold the features of which visuals.

    Args:
        count: slots, each for one token.

    >>> slots = FeatureSlots(4)
    >>> slots.take(b"one", 3, kept=()), slots.take(b"other", 2, kept=(b"one",))
    (True, False)
    >>> slots.take(b"other", 2, kept=()), b"one" in slots
    (True, False)
    """

    def __init__(self, count: int) -> None:
        """All are free."""
        self._free = list(range(count))[::-1]
        self._taken: OrderedDict[bytes, Int[np.ndarray, " tokens"]] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        """Tell whether a visual has slots; it counts as used now."""
        if key in self._taken:
            self._taken.move_to_end(key)
        return key in self._taken

    def __getitem__(self, key: bytes) -> Int[np.ndarray, " tokens"]:
        """Return the slots of a visual's tokens."""
        return self._taken[key]

    def take(self, key: bytes, tokens: int, kept: Container[bytes]) -> bool:
        """Give a visual slots; False if there are not enough.

        Args:
            key: of the visual, which has none.
            tokens: of the visual.
            kept: keys of those that keep theirs; of others those used least recently lose them.
        """
        others = [each for each in self._taken if each not in kept]
        if len(self._free) + sum(len(self._taken[each]) for each in others) < tokens:
            return False
        while len(self._free) < tokens:
            self._free += self._taken.pop(others.pop(0)).tolist()[::-1]
        self._taken[key] = np.array([self._free.pop() for _ in range(tokens)], np.int32)
        return True


class FeatureCache:
    """Runs the tower on what pieces of prompts need, and keeps features while there is room.

    Args:
        programs: of a model that has a tower.
        vision: the tower.

    Attributes:
        held: the features of all parts; None before the first visual and after `free`.
    """

    def __init__(self, programs: Programs, vision: VisionSpec) -> None:
        """Hold nothing."""
        self._programs, self._vision = programs, vision
        self.held: VisualFeatures | None = None
        self.forget()

    def forget(self) -> None:
        """Count what is held as that of other weights, of no use any more."""
        sizes = self._programs.sizes
        self._slots = [FeatureSlots(sizes.visual_tokens) for _ in range(sizes.parts)]

    def free(self) -> None:
        """Free the memory."""
        self.held = None
        self.forget()

    def encode(
        self, params: Any, placed: Sequence[SequenceState | None], ends: Sequence[int]
    ) -> list[int]:
        """Encode what the next pieces of prompts hold and is not there.

        Args:
            params: the weights.
            placed: whose piece each row reads, from `cached` on.
            ends: where it ends.

        Returns:
            Where pieces end so that they split no image that is read whole, and there is room for
            all that they hold. The first one of each part has it.
        """
        parts = range(len(self._slots))
        new: list[list[Visual]] = [[] for _ in parts]
        kept: list[set[bytes]] = [set() for _ in parts]
        shortened = list(ends)
        for row, s in enumerate(placed):
            if s is None or s.visuals is None:
                continue
            shortened[row] = s.visuals.whole_until(s.cached, ends[row])
            for number in s.visuals.within(s.cached, shortened[row]):
                visual = s.request.visuals[number]
                if visual.key not in self._slots[s.part]:
                    if not self._slots[s.part].take(visual.key, visual.tokens, kept[s.part]):
                        shortened[row] = max(s.cached, s.visuals.first(number))
                        break
                    new[s.part].append(visual)
                kept[s.part].add(visual.key)
        at_once = min(PATCHES_AT_ONCE, self._programs.sizes.patch_shapes[-1][0])
        while any(new):
            self._encode(params, [_take_row(visuals, at_once) for visuals in new])
        if self.held is None:
            self.held = self._programs.make_features()
        return shortened

    def slots(
        self, placed: Sequence[SequenceState | None], ends: Sequence[int], length: int
    ) -> Int[np.ndarray, "B T"]:
        """Return where the features of each row's tokens are; -1 for text."""
        table = np.full((len(placed), length), -1, np.int32)
        for row, (s, end) in enumerate(zip(placed, ends, strict=True)):
            if s is None or s.visuals is None:
                continue
            piece = slice(s.cached, end)
            number, index = s.visuals.number[piece], s.visuals.index[piece]
            for visual in s.visuals.within(s.cached, end):
                own = np.flatnonzero(number == visual)
                table[row, own] = self._slots[s.part][s.request.visuals[visual].key][index[own]]
        return table

    def _encode(self, params: Any, rows: Sequence[Sequence[Visual]]) -> None:
        """Encode a row of each part."""
        sizes = self._programs.sizes
        most = max(sum(len(visual.patches) for visual in row) for row in rows)
        frame = frame_bounds(rows).longest or 0
        length, longest = next(
            (length, longest)
            for length, longest in sizes.patch_shapes
            if length >= most and longest >= frame
        )
        targets = np.full((len(rows), length // self._vision.group), sizes.visual_tokens, np.int32)
        for part, row in enumerate(rows):
            slots = [self._slots[part][visual.key] for visual in row]
            targets[part, : sum(map(len, slots))] = np.concatenate([[], *slots])
        patches = patch_rows(self._vision, rows, length)
        patches, targets = distributed.put((patches, targets), self._programs.by_row)
        held, self.held = self.held, None  # donated
        held = self._programs.make_features() if held is None else held
        self.held = self._programs.encode(params, held, patches, targets, longest)


def _take_row(visuals: list[Visual], at_once: int) -> list[Visual]:
    """Take from the front one visual, and more while they have no more patches than these.

    >>> small = [Visual(np.zeros((4, 12), np.uint8), (1, 2, 2), 2, b"") for _ in range(3)]
    >>> len(_take_row(small, 8)), len(_take_row(small, 8))
    (2, 1)
    """
    row = [visuals.pop(0)] if visuals else []
    size = sum(len(visual.patches) for visual in row)
    while visuals and size + len(visuals[0].patches) <= at_once:
        row.append(visuals.pop(0))
        size += len(row[-1].patches)
    return row
