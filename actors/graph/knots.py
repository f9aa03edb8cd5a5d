"""Whether groups of jobs that start together can ever start. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


def find_knot(needs: Mapping[T, Iterable[T]], groups: Mapping[T, str]) -> list[tuple[T, T]] | None:
    """Edges (job, what it needs) along which a group waits for itself; None when there are none.

    A group starts when everything that any of its members needs is there, so it stands for one
    node of the graph, and the graph must have no cycle through it. `needs` has no cycle without
    groups; what it does not name needs nothing.
    """
    members: dict[str, list[T]] = {}
    for job, group in groups.items():
        members.setdefault(group, []).append(job)

    def node_of(job: T) -> Hashable:
        return ("group", groups[job]) if job in groups else ("job", job)

    def edges(job: T) -> Iterator[tuple[T, T]]:
        for peer in members[groups[job]] if job in groups else [job]:
            for needed in needs.get(peer, ()):
                yield peer, needed

    done: set[Hashable] = set()
    for first in groups:
        if node_of(first) in done:
            continue
        path: list[tuple[T, T]] = []
        nodes = {node_of(first): 0}
        """On the path, with how many edges lead there."""
        pending = [edges(first)]
        while pending:
            for edge in pending[-1]:
                node = node_of(edge[1])
                if node in nodes:
                    return [*path[nodes[node] :], edge]
                if node not in done:
                    path.append(edge)
                    nodes[node] = len(path)
                    pending.append(edges(edge[1]))
                    break
            else:
                pending.pop()
                done.add(nodes.popitem()[0])
                if path:
                    path.pop()
    return None
