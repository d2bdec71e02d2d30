"""`python -m tests.cache.exits START WAY`: a process of `multiprocessing` that ends in one of several ways."""

from __future__ import annotations

import multiprocessing
import sys

from fused_eager.cache.exits import call_at_exit, error_at_exit, fail_at_exit, note_codes


def note(word: str) -> None:
    print(word, repr(error_at_exit()), flush=True)


def child(way: str) -> None:
    if way.startswith("fails"):
        note_codes()
        call_at_exit(fail_at_exit, OSError("the last of it was lost"))
    for word in ("first", "second"):
        call_at_exit(note, word)
    way = way.removeprefix("fails, ")
    if way == "raises":
        raise ValueError("bad data")
    if way == "leaves":  # as torch.multiprocessing does where the program has raised
        try:
            raise KeyError("bad key")
        except KeyError:
            sys.exit(1)
    if way == "has its code":
        sys.exit(7)
    if way == "ends":
        sys.exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "alone":
        child(sys.argv[2])
        sys.exit(0)
    process = multiprocessing.get_context(sys.argv[1]).Process(target=child, args=(sys.argv[2],))
    process.start()
    process.join(60)
    sys.exit(process.exitcode)
