"""A corpus with built-in analogies, and the score of embeddings on analogies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

RELATIONS, ENTITIES, CONTEXT = 4, 12, 8
SENTENCES = 6000
LENGTH = 5


@dataclass(frozen=True)
class Corpus:
    """Sentences of words that stand for an entity in a relation, like "queen", and words that tell which.

    Word ``ENTITIES * r + e`` is entity e in relation r. Then come ``CONTEXT`` words that occur with each entity, and as
    many with each relation.

    Attributes:
        sentences: (SENTENCES, 5) words: one of an entity and relation, two of its entity, two of its relation.
        words: size of the vocabulary.
    """

    sentences: Tensor
    words: int

    def batches(self, epochs: int, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Contexts (size, 4) and centres (size,): each sentence once an epoch, one of its words the centre."""
        generator = torch.Generator().manual_seed(seed)
        for _ in range(epochs):
            order = torch.randperm(len(self.sentences), generator=generator)
            for some in order.split(size):
                places = torch.stack([torch.randperm(LENGTH, generator=generator) for _ in some])
                shuffled = self.sentences[some].gather(1, places)
                yield shuffled[:, 1:], shuffled[:, 0]


def synthetic(seed: int = 0) -> Corpus:
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator)

    of_entity = RELATIONS * ENTITIES
    of_relation = of_entity + ENTITIES * CONTEXT
    relation, entity = draw(RELATIONS, SENTENCES), draw(ENTITIES, SENTENCES)
    centre = relation * ENTITIES + entity
    about_entity = of_entity + entity[:, None] * CONTEXT + draw(CONTEXT, SENTENCES, 2)
    about_relation = of_relation + relation[:, None] * CONTEXT + draw(CONTEXT, SENTENCES, 2)
    sentences = torch.cat([centre[:, None], about_entity, about_relation], 1)
    return Corpus(sentences, of_relation + RELATIONS * CONTEXT)


def questions() -> Tensor:
    """(count, 4) words a, b, c, d with "a is to b as c is to d": two relations r and R, two entities e and E."""
    found = [
        (r * ENTITIES + e, R * ENTITIES + e, r * ENTITIES + E, R * ENTITIES + E)
        for r in range(RELATIONS)
        for R in range(RELATIONS)
        for e in range(ENTITIES)
        for E in range(ENTITIES)
        if r != R and e != E
    ]
    return torch.tensor(found)


def accuracy(embeddings: Tensor, asked: Tensor) -> float:
    """Share of questions whose answer has the largest inner product with ``b - a + c``, those three left out.

    Args:
        embeddings: (words, n), a row for each word.
        asked: (count, 4) questions.
    """
    scores = _scores(embeddings, asked)
    return (scores.argmax(1) == asked[:, 3]).double().mean().item()


def ranks(embeddings: Tensor, asked: Tensor, among: int) -> Tensor:
    """(count,) places of the answers, from 1, among the first ``among`` words."""
    scores = _scores(embeddings, asked)[:, :among]
    return 1 + (scores > scores.gather(1, asked[:, 3:])).sum(1)


def _scores(embeddings: Tensor, asked: Tensor) -> Tensor:
    a, b, c = asked[:, :3].T
    scores = (embeddings[b] - embeddings[a] + embeddings[c]) @ embeddings.T
    return scores.scatter(1, asked[:, :3], float("-inf"))
