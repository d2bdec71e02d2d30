"""The programs of others that tests run: the system's where it has them, else Debian's, unpacked into a folder.

`python -m tests.services.programs` gets what is missing. Nothing is installed: packages are downloaded and unpacked
under `build/services`, so that it takes no root, starts no daemon and leaves the system as it was."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "build" / "services"
ROOT = FOLDER / "root"
# Whoever is not root has these on no path.
SBIN = "/usr/sbin:/sbin:/usr/local/sbin"

# Each program: Debian's package, its file there, and the names under which a system may have it.
PROGRAMS = {
    "redis-server": ("redis-server", "usr/bin/redis-server", ("redis-server", "valkey-server")),
    "nginx": ("nginx", "usr/sbin/nginx", ("nginx",)),
    "ip": ("iproute2", "bin/ip", ("ip",)),
    # The shell has no windows and no toolkit for them, and a third of the packages.
    "chromium": (
        "chromium-headless-shell",
        "usr/lib/chromium/chromium-headless-shell",
        ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable"),
    ),
}


def command(name: str) -> list[str] | None:
    """How to start a program; None where it is not there."""
    _, file, names = PROGRAMS[name]
    for each in names:
        found = shutil.which(each) or shutil.which(each, path=SBIN)
        if found:
            return [found]
    if not (ROOT / file).exists():
        return None
    # Some libraries lie a folder deeper, where only their own packages look for them.
    libraries = sorted({library.parent for library in ROOT.glob("**/*-linux-*/**/*.so*")})
    given = os.environ.get("LD_LIBRARY_PATH")
    path = ":".join([*map(str, libraries), *([given] if given else [])])
    return ["env", f"LD_LIBRARY_PATH={path}", str(ROOT / file)]


def missing() -> list[str]:
    return [name for name in PROGRAMS if command(name) is None]


def _apt(*arguments: str) -> None:
    """apt-get with lists and archives of its own: it reads what the system has, and writes nothing there."""
    where = {
        "Dir::State::lists": FOLDER / "lists",
        "Dir::Cache": FOLDER / "cache",
        "Dir::Cache::archives": FOLDER / "archives",
        "Debug::NoLocking": "1",
        "APT::Sandbox::User": "root" if os.geteuid() == 0 else "",
    }
    for folder in ("lists", "cache", "archives"):
        (FOLDER / folder / "partial").mkdir(parents=True, exist_ok=True)
    options = [word for name, value in where.items() if value for word in ("-o", f"{name}={value}")]
    subprocess.run(["apt-get", "-q", "-y", *options, *arguments], check=True, stdout=subprocess.DEVNULL, timeout=300)


def get() -> None:
    """Unpack what is missing, with its libraries. Raises RuntimeError: what is to be installed by hand."""
    lacking = missing()
    if not lacking:
        return
    packages = [PROGRAMS[name][0] for name in lacking]
    by_hand = f"Install {', '.join(lacking)} (Debian: apt-get install {' '.join(packages)}) and try again."
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise RuntimeError(f"This system ({platform.platform()}) has no apt-get to take packages from. {by_hand}")
    print(f"Downloading {', '.join(packages)} into {FOLDER}", flush=True)
    try:
        _apt("update")
        _apt("--download-only", "--no-install-recommends", "install", *packages)
        for archive in sorted((FOLDER / "archives").glob("*.deb")):
            subprocess.run(["dpkg-deb", "-x", archive, ROOT], check=True, timeout=120)
    except (OSError, subprocess.SubprocessError) as error:
        raise RuntimeError(f"Packages could not be downloaded and unpacked ({error}). {by_hand}") from error
    finally:
        for folder in ("lists", "cache", "archives"):
            shutil.rmtree(FOLDER / folder, ignore_errors=True)
    lacking = missing()
    if lacking:
        raise RuntimeError(f"The packages of {', '.join(lacking)} hold no such program. {by_hand}")


if __name__ == "__main__":
    try:
        get()
    except RuntimeError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
