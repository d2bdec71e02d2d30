"""What the tests have run of each folder: `python -m tests.covered build/coverage.json`, after `make coverage`."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path, PurePath


def by_folder(files: dict[str, dict[str, dict[str, int]]]) -> dict[str, tuple[int, int]]:
    """Lines that were run, and all that there are, of each folder two levels deep, as coverage's JSON counts them."""
    ran: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for name, found in files.items():
        folder = "/".join(PurePath(name).parent.parts[:2])
        ran[folder] += found["summary"]["covered_lines"]
        lines[folder] += found["summary"]["num_statements"]
    return {folder: (ran[folder], lines[folder]) for folder in sorted(lines)}


def main(file: str) -> int:
    """Print a line a folder, and the whole."""
    folders = by_folder(json.loads(Path(file).read_text())["files"])
    folders["in all"] = (sum(ran for ran, _ in folders.values()), sum(lines for _, lines in folders.values()))
    for folder, (ran, lines) in folders.items():
        print(f"{ran / max(lines, 1):6.0%}  {lines:6} lines  {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
