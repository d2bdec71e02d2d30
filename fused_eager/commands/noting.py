"""A program run while the streams that it comes to are noted: what `bug-report` starts, in a process of its own.

Each stream is written into a folder as a program (`reporting.reproducing`) before it is planned, so that one which ends
the process is there. Of many, the first, the last and the longest are kept.
"""

from __future__ import annotations

import sys
from pathlib import Path

from . import launch

FIRST, LAST, LONGEST = 4, 8, 4  # streams


class Notes:
    """The streams that a program has come to, as files in a folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.ops: dict[int, int] = {}  # of each stream that is kept, by number
        self.count = 0

    def __call__(self, work: object) -> None:
        """A stream is about to be planned."""
        from ..reporting.reproducing import as_program

        self.count += 1
        try:
            text = as_program(work)  # type: ignore[arg-type]
        except Exception as error:  # the program goes on, whatever its stream holds
            text = f"# this stream cannot be written down: {type(error).__name__}: {error}\n"
        self._file(self.count).write_text(text)
        self.ops[self.count] = len(work.nodes)  # type: ignore[attr-defined]
        for number in set(self.ops) - self._kept():
            del self.ops[number]
            self._file(number).unlink()

    def _kept(self) -> set[int]:
        numbers = sorted(self.ops)
        longest = sorted(numbers, key=lambda n: -self.ops[n])[:LONGEST]
        return {*numbers[:FIRST], *numbers[-LAST:], *longest}

    def _file(self, number: int) -> Path:
        return self.folder / f"{number:06}.py"


def main(argv: list[str]) -> int:
    """`noting FOLDER ...`: what follows is as for `run`."""
    from ..executing.load import WATCHERS

    WATCHERS.append(Notes(Path(argv[0])))
    return launch.main(argv[1:], "python -m fused_eager bug-report")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
