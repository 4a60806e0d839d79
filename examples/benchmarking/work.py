"""What there is to do, in batches of one method each, and which process does what."""

from collections import defaultdict
from dataclasses import dataclass

import torch


def part_of(prompts: list, rank: int, world: int) -> list:
    """One process's prompts: equal work for all, where answers are known every process gets long and short ones alike."""
    places = sorted(range(len(prompts)), key=lambda i: prompts[i].answer_length or 0)
    return [prompts[i] for i in sorted(places[rank::world])]


def batches(prompts: list, size: int, mix_sets: bool = False) -> list[list]:
    """Batches of one set each unless `mix_sets`; prompts of like answers (if known) and like length go together, since a batch runs
    as long as its longest answer."""
    if size == 1:
        return [[prompt] for prompt in prompts]
    sets = defaultdict(list)
    for prompt in prompts:
        sets[None if mix_sets else prompt.dataset].append(prompt)
    parts = []
    for rows in sets.values():
        rows = sorted(rows, key=lambda prompt: (prompt.answer_length or 0, len(prompt.input_ids)))
        parts.append([rows[i : i + size] for i in range(0, len(rows), size)])
    return [part[i] for i in range(max(map(len, parts))) for part in parts if i < len(part)]


@dataclass
class Unit:
    """What one process does at a time: the prompts of a batch that are not in the store yet, decoded by one method."""

    temperature: float
    seed: int
    place: int  # of the batch among all batches
    prompts: list
    method: dict

    @property
    def gives_answers(self) -> bool:
        """Whether texts of other units are compared with this one's."""
        return self.temperature == 0 and self.method["kind"] == "target"

    def rounds(self, max_new_tokens: int) -> float:
        """Roughly how many rounds it takes, in passes of the target alone; good enough to share work out.

        A batch runs as long as its longest answer; drafters commit some 4 tokens a round at T=0 and 2 at T > 0, and their
        rounds cost about a third more.
        """
        lengths = [min(prompt.answer_length or max_new_tokens, max_new_tokens) for prompt in self.prompts]
        if self.method["kind"] == "target":
            return max(lengths)
        # Transformers' assisted generation takes one prompt at a time
        length = max(lengths) if self.method["kind"] == "drafter" else sum(lengths)
        return length / (3 if self.temperature == 0 else 1.5)


def share_out(units: list[Unit], world: int, max_new_tokens: int) -> tuple[list[list[Unit]], list[list[Unit]]]:
    """Two parts of every process's work, between which all processes meet.

    The first part holds what gives answers, shared out evenly, and work that needs no answers where a process would only wait for the
    others. Units start in the order of their batches, longest answers first, with all methods and temperatures of a batch, each at the
    process that is free first: a run that is cut then has the same prompts of all methods as far as possible, and short units at the
    end make all processes finish at about the same time. All processes compute the same plan.
    """
    rounds = {id(unit): unit.rounds(max_new_tokens) for unit in units}
    longest = defaultdict(float)
    for unit in units:
        lengths = [min(prompt.answer_length or max_new_tokens, max_new_tokens) for prompt in unit.prompts]
        longest[unit.place] = max(longest[unit.place], *lengths)
    units = sorted(units, key=lambda unit: (-longest[unit.place], unit.place, -rounds[id(unit)]))
    first, then = ([[] for _ in range(world)] for _ in range(2))
    load = [0.0] * world

    def give(shares: list[list[Unit]], unit: Unit, until: float = float("inf")) -> bool:
        rank = load.index(min(load))
        if load[rank] + rounds[id(unit)] > until:
            return False
        load[rank] += rounds[id(unit)]
        shares[rank].append(unit)
        return True

    for unit in units:
        if unit.gives_answers:
            give(first, unit)
    meeting, rest = max(load), []
    for unit in units:
        if not unit.gives_answers and not (unit.temperature > 0 and give(first, unit, meeting)):
            rest.append(unit)
    load = [0.0] * world
    for unit in rest:
        give(then, unit)
    return first, then


def agreed(finished: bool, world: int) -> bool:
    """Whether all processes finished; waits for them, so every process must call it equally often."""
    if world == 1:
        return finished
    flag = torch.tensor(int(finished))
    torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MIN)
    return bool(flag)
