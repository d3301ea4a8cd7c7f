"""The canonical tree over the lanes of a step: which sums may be formed.

A node is the half-open range of lanes it covers. Neighbours pair from the left at every level, and an
odd last node moves up unchanged, so 5 lanes give ``((01)(23))4``. Only siblings may be added: whoever
keeps to that gets the bits of every other order of work. This file never touches a number to be added.
"""

Node = tuple[int, int]
"""The lanes ``start`` to ``stop - 1``, as ``(start, stop)``."""


def leaf(lane: int) -> Node:
    """The node of one lane."""
    return (lane, lane + 1)


def root(lanes: int) -> Node:
    """The node of all lanes."""
    return (0, lanes)


def parent(node: Node, lanes: int) -> Node:
    """The smallest node that covers more than ``node``.

    >>> parent((4, 5), lanes=5)
    (0, 5)
    """
    if node == root(lanes):
        raise ValueError(f"node {node} is the root of {lanes} lanes and has no parent")
    width = 2
    while True:
        start = node[0] // width * width
        candidate = (start, min(start + width, lanes))
        if candidate[0] <= node[0] and node[1] <= candidate[1] and candidate != node:
            return candidate
        width *= 2


def sibling(node: Node, lanes: int) -> Node:
    """The node that is added to ``node`` to make its parent.

    >>> sibling((2, 4), lanes=8)
    (0, 2)
    """
    start, stop = parent(node, lanes)
    return (start, node[0]) if node[0] > start else (node[1], stop)


def aligned(start: int, stop: int, lanes: int) -> tuple[Node, ...]:
    """The fewest nodes that together cover the lanes ``start`` to ``stop - 1``.

    >>> aligned(3, 6, lanes=8)
    ((3, 4), (4, 6))
    """
    nodes = []
    position = start
    while position < stop:
        node = leaf(position)
        while node != root(lanes):
            above = parent(node, lanes)
            if above[0] < position or above[1] > stop:
                break
            node = above
        nodes.append(node)
        position = node[1]
    return tuple(nodes)


def grouping(lanes: int) -> str:
    """The canonical sum, written out with brackets.

    >>> grouping(5)
    '(((0+1)+(2+3))+4)'
    """

    def write(node: Node) -> str:
        if node[1] - node[0] == 1:
            return str(node[0])
        left = aligned_left(node)
        return f"({write((node[0], left))}+{write((left, node[1]))})"

    return write(root(lanes))


def aligned_left(node: Node) -> int:
    """Where the left child of a node ends and its right child begins."""
    width = 1
    while width * 2 < node[1] - node[0]:
        width *= 2
    return node[0] + width
