"""Statements of further kinds: what users do to tensors that the base statements do not.

They are drawn from a stream of their own, and only where a program is asked for with them (`--kinds`): the programs
of the base statements stay what they are. What is to live on and is no plain tensor is put into `kept`, a dict.
"""

from __future__ import annotations

from . import differentiated, edges, hooks, observed, overlaps, scripts, sparse, subclasses, threads

KINDS: dict[str, list[str]] = {
    "subclasses": subclasses.STATEMENTS,
    "scripts": scripts.STATEMENTS,
    "profiler": observed.STATEMENTS,
    "hooks": hooks.STATEMENTS,
    "threads": threads.STATEMENTS,
    "sparse": sparse.STATEMENTS,
    "overlaps": overlaps.STATEMENTS,
    "edges": edges.STATEMENTS,
    "forward": differentiated.STATEMENTS,
}
