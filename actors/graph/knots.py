"""Whether groups of jobs that start together can ever start. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


def find_knot(needs: Mapping[T, Iterable[T]], groups: Mapping[T, str]) -> list[T] | None:
    """Jobs of a path along which a group waits for itself, each needing the next one or being in
    one group with it; None when there is none.

    A group starts when everything that any of its members needs is there, so it stands for one
    node of the graph, and the graph must have no cycle through it. `needs` has no cycle without
    groups; what it does not name needs nothing.
    """
    members: dict[str, list[T]] = {}
    for job, group in groups.items():
        members.setdefault(group, []).append(job)

    def steps(job: T) -> Iterator[T]:
        """What stands between the start of this job and now."""
        for peer in members[groups[job]] if job in groups else [job]:
            yield from needs.get(peer, ())

    def key(job: T) -> Hashable:
        return ("group", groups[job]) if job in groups else ("job", job)

    done: set[Hashable] = set()
    for first in groups:
        if key(first) in done:
            continue
        path, on_path, pending = [first], {key(first)}, [steps(first)]
        while pending:
            for job in pending[-1]:
                if key(job) in on_path:
                    start = next(i for i, seen in enumerate(path) if key(seen) == key(job))
                    return [*path[start:], job]
                if key(job) not in done:
                    path.append(job)
                    on_path.add(key(job))
                    pending.append(steps(job))
                    break
            else:
                pending.pop()
                ended = key(path.pop())
                on_path.discard(ended)
                done.add(ended)
    return None
