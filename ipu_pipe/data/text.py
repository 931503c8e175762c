"""Text as integers: windows of characters that predict the next one, and pairs of sentences to
translate.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, Sequence

import numpy as np
import torch

from ipu_pipe.data.sources import (
    Pair,
    SampledData,
    TensorData,
    draw_order,
    require_int,
    split_off_test,
    take_subset,
)
from ipu_pipe.errors import BadInput
from ipu_pipe.model.randomness import derive_seed
from ipu_pipe.text import show


class TextData(SampledData):
    """Windows of `context` characters of a text; the label of each character is the one after it.

    x, y: (b, context) of numbers of characters, which are counted in the order of the whole text's
    characters, sorted: `vocabulary`, `vocabulary_size` of them. With `ascii` they are ASCII codes,
    so that a model can go on with another text.

    Of the first `characters` characters the last tenth is the test part, cut into windows side by
    side. The training windows of an epoch lie side by side too, from an offset below `context`; the
    offset and the windows' order are drawn by (seed, epoch). The last window but a part is left for
    the offset. A validation part is the end of the training text.
    """

    def __init__(
        self,
        text: bytes,
        seed: int = 0,
        context: int = 64,
        characters: int | None = None,
        subset: int | None = None,
        test_subset: int | None = None,
        ascii: bool = False,
    ) -> None:
        require_int("context", context)
        require_int("characters", characters, 20, len(text), optional=True)
        codes = np.frombuffer(text, dtype=np.uint8)
        characters_used, numbers = (
            (np.arange(128, dtype=np.uint8), codes)
            if ascii
            # of the whole text, so that a model of its first part knows the characters of the rest
            else np.unique(codes, return_inverse=True)
        )
        self.vocabulary = characters_used.tobytes().decode("latin-1")
        self.vocabulary_size = len(characters_used)
        # np.unique numbers by int64, eight times the memory of the text
        numbers = numbers[:characters].astype(np.uint8)
        train_length = len(numbers) * 9 // 10
        # a training window beside that of the offset, and a test window with the character after it
        longest = min(train_length // 2, len(numbers) - train_length - 1)
        if context > longest:
            raise BadInput(
                f"data.context: {show(context)}: must be from 1 to {longest} for {len(numbers)} "
                f"characters,"
                " a tenth of them for tests"
            )
        self._text = torch.from_numpy(numbers[:train_length])
        self._test_text = torch.from_numpy(numbers[train_length:])
        count = train_length // context - 1
        test_count = (len(numbers) - train_length - 1) // context
        require_int("subset", subset, 1, count, optional=True)
        require_int("test_subset", test_subset, 1, test_count, optional=True)
        self.train_samples = subset or count
        self.test_samples = test_subset or test_count
        self._context = context
        self._seed = seed
        self._epoch = -1

    def _split_training_set(
        self, validation: Any, held_out: torch.Tensor, remaining: torch.Tensor
    ) -> None:
        # windows begin anywhere: the validation part is the end of the training text, and no
        # character is in both; the training part loses a window to the offset
        self.train_samples = len(remaining) - 1
        cut = len(remaining) * self._context
        # and the character after the last window, which is its last label
        validation._test_text = self._text[cut : cut + len(held_out) * self._context + 1]
        self._text = self._text[:cut]

    def take_train(self, epoch: int, positions: range) -> Pair:
        """Return the windows at these positions of an epoch."""
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(derive_seed(self._seed, "offset", epoch))
            offset = torch.randint(0, self._context, (), generator=generator)
            self._starts = (
                draw_order(self._seed, epoch, self.train_samples) * self._context + offset
            )
            self._epoch = epoch
        return self._cut_windows(self._text, self._starts[positions.start : positions.stop])

    def take_test(self, positions: range) -> Pair:
        """Return the windows at these positions of the test part."""
        return self._cut_windows(
            self._test_text, torch.arange(positions.start, positions.stop) * self._context
        )

    def _cut_windows(self, text: torch.Tensor, starts: torch.Tensor) -> Pair:
        # (b, context)
        positions = starts[:, None] + torch.arange(self._context)
        return text[positions].long(), text[positions + 1].long()


# ---- translation

PADDING, UNKNOWN, BEGIN, END = range(4)
SPECIAL = ["<pad>", "<unk>", "<begin>", "<end>"]
TEST_PAIRS = 1000
# the label that cross-entropy ignores
NO_LABEL = -100
# the greatest `length`; every verse is shorter
LONGEST = 512


def split_into_tokens(line: str) -> list[str]:
    """Split a line into words in lower case and single punctuation marks."""
    return re.findall(r"\w+|[^\w\s]", line.lower())


class TranslationData(TensorData):
    """Pairs of sentences of at most `length` tokens, begin or end among them; 1000 drawn once are
    the test part.

    x: (b, 2, length), the source, and the target shifted right after a begin token; y: (b, length),
    the target and an end token, -100 where padded. A token is a word or a mark. A language has at
    most `vocabulary` tokens: padding, unknown, begin, end and the most frequent ones of the
    training pairs. `source_tokens` and `target_tokens` list them by number, `source_vocabulary` and
    `target_vocabulary` are their lengths, `left_out` is the number of longer pairs.
    """

    def __init__(
        self,
        sources: Sequence[str],
        targets: Sequence[str],
        seed: int = 0,
        length: int = 32,
        vocabulary: int = 8000,
        subset: int | None = None,
        test_subset: int | None = None,
    ) -> None:
        require_int("length", length, 2, LONGEST)
        require_int("vocabulary", vocabulary, len(SPECIAL) + 1)
        read = [
            (split_into_tokens(source), split_into_tokens(target))
            for source, target in zip(sources, targets)
        ]
        pairs = [
            (source, target)
            for source, target in read
            # beside the target there is the begin or the end token
            if len(source) <= length and len(target) < length
        ]
        self.left_out = len(read) - len(pairs)
        if len(pairs) <= TEST_PAIRS:
            raise BadInput(
                f"data.length: {show(length)}: {len(pairs)} pairs have at most this length: must "
                f"be more than"
                f" {TEST_PAIRS}: use a larger length"
            )
        positions = torch.arange(len(pairs))
        # the vocabulary must not know the words of the test pairs
        # drawn by the same seed as the pairs below
        (chosen, _), _ = split_off_test(positions, positions, TEST_PAIRS)
        self.source_tokens = _list_most_frequent([pairs[i][0] for i in chosen.tolist()], vocabulary)
        self.target_tokens = _list_most_frequent([pairs[i][1] for i in chosen.tolist()], vocabulary)
        self.source_vocabulary = len(self.source_tokens)
        self.target_vocabulary = len(self.target_tokens)
        train, test = split_off_test(
            *_number_words(pairs, length, self.source_tokens, self.target_tokens), TEST_PAIRS
        )
        super().__init__(*take_subset(train, test, subset, test_subset), seed)


def _list_most_frequent(lines: Sequence[Sequence[str]], vocabulary: int) -> list[str]:
    """List the special tokens, then the most frequent tokens of `lines`, equally frequent ones by
    the alphabet.
    """
    counts = Counter(token for line in lines for token in line)
    return (
        SPECIAL
        + sorted(counts, key=lambda token: (-counts[token], token))[: vocabulary - len(SPECIAL)]
    )


def _number_words(
    pairs: Sequence[Any], length: int, source_tokens: Sequence[str], target_tokens: Sequence[str]
) -> Pair:
    source_numbers, target_numbers = (
        {t: n for n, t in enumerate(tokens)} for tokens in (source_tokens, target_tokens)
    )
    x = np.full((len(pairs), 2, length), PADDING, dtype=np.int64)
    y = np.full((len(pairs), length), NO_LABEL, dtype=np.int64)
    for row, (source, target) in enumerate(pairs):
        numbers = [target_numbers.get(token, UNKNOWN) for token in target]
        x[row, 0, : len(source)] = [source_numbers.get(token, UNKNOWN) for token in source]
        # the decoder sees the token before each that it predicts
        x[row, 1, : len(target) + 1] = [BEGIN, *numbers]
        y[row, : len(target) + 1] = [*numbers, END]
    return torch.from_numpy(x), torch.from_numpy(y)
