"""Which training prompt comes next: a cursor over the data that a checkpoint can hold in a few numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from storage.errors import UserError
from storage.records import TRAIN_SPLIT, GroupKey, Prompt


class PromptSource:
    """Gives each prompt once per epoch.

    The order is a function of seed and epoch alone, so the number of prompts drawn is the whole state.
    """

    def __init__(self, prompts: Sequence[Prompt], *, shuffle: bool, seed: int, epochs: int | None) -> None:
        """Start before the first prompt of epoch 0.

        Args:
            prompts: The data set; may be empty only where nothing is drawn.
            shuffle: Draw each epoch in a new order, else in the order given.
            seed: Seed of the orders.
            epochs: Passes over the data; None never ends.
        """
        self._prompts = prompts
        self._shuffle = shuffle
        self._seed = seed
        self._epochs = epochs
        self._drawn = 0
        self._order: tuple[int, npt.NDArray[np.int64]] | None = None
        self._fingerprint: str | None = None

    @property
    def epoch(self) -> int:
        """Epoch of the prompt that comes next; every prompt of earlier epochs has been drawn."""
        return self._drawn // max(1, len(self._prompts))

    @property
    def progress(self) -> float:
        """Epochs drawn so far: 1.25 is a quarter into the second."""
        return self._drawn / max(1, len(self._prompts))

    @property
    def left_in_epoch(self) -> int:
        """Prompts that can be drawn before the next epoch begins: from the size of the data down to 1."""
        return len(self._prompts) - self._drawn % max(1, len(self._prompts))

    @property
    def remaining(self) -> int | None:
        """Prompts that can still be drawn, over all epochs; None when there is no end."""
        if not self._prompts:
            return 0
        return None if self._epochs is None else max(0, self._epochs * len(self._prompts) - self._drawn)

    def next(self) -> tuple[GroupKey, Prompt] | None:
        """Draw a prompt and name its group; None at the end of the last epoch."""
        if self.remaining == 0:
            return None
        epoch, position = divmod(self._drawn, len(self._prompts))
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, self.order(epoch))
        prompt = self._prompts[self._order[1][position]]
        self._drawn += 1
        return GroupKey(TRAIN_SPLIT, epoch, prompt.index), prompt

    def upcoming(self, count: int) -> list[Prompt]:
        """The prompts that the next ``count`` calls of :meth:`next` will return, without drawing them."""
        drawn = self._drawn
        found = [drawn_one[1] for _ in range(count) if (drawn_one := self.next()) is not None]
        self._drawn = drawn
        return found

    def order(self, epoch: int) -> npt.NDArray[np.int64]:
        """Positions of the prompts in the order in which ``epoch`` draws them, int64[prompts]."""
        if not self._shuffle:
            return np.arange(len(self._prompts))
        return np.random.default_rng(np.random.SeedSequence([self._seed, epoch])).permutation(len(self._prompts))

    def state(self) -> dict[str, Any]:
        """Return the cursor, and what it is a cursor into, as JSON values."""
        return {"drawn": self._drawn, **self._identity()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`state` was taken.

        Raises:
            UserError: The state belongs to other prompts, or to another order of them.
        """
        names = {
            "prompts": "the number of training prompts (data.prompts)",
            "seed": "the seed of their order (run.seed)",
            "shuffle": "data.shuffle",
            "content": "the training prompts (data.train, its file or its seed, or the model's tokenizer)",
        }
        for field, here in self._identity().items():
            saved = state.get(field)
            if saved != here:
                values = "" if field == "content" else f": {saved} in the checkpoint, {here} now"
                raise UserError(
                    f"cannot resume: {names[field]} changed since the checkpoint{values}; put it back, or start a new "
                    "run"
                )
        self._drawn = int(state["drawn"])

    def _identity(self) -> dict[str, Any]:
        if self._fingerprint is None:
            digest = xxhash.xxh3_64()
            for prompt in self._prompts:
                digest.update(f"{prompt.index} {len(prompt.token_ids)} ".encode())
                digest.update(np.ascontiguousarray(prompt.token_ids, np.int32).tobytes())
            self._fingerprint = digest.hexdigest()
        return {
            "prompts": len(self._prompts),
            "seed": self._seed,
            "shuffle": self._shuffle,
            "content": self._fingerprint,
        }
