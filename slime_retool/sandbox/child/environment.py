"""What the code can import: the interpreter's standard library and chosen packages, nothing else of the environment.

Two views: `package_folders` runs in the caller's environment and finds the packages by their metadata; `host_paths`
runs in the zygote's bare interpreter and names what it needs of the system.
"""

from __future__ import annotations

import glob
import os
import re
import sys
import sysconfig
from dataclasses import dataclass

DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")


def package_folders(names: tuple[str, ...]) -> dict[str, str]:
    """Import path entries (`numpy`, `numpy.libs`, `six.py`) -> real paths, of distributions and what they require.

    Raises LookupError naming a distribution that is not installed.
    """
    from importlib import metadata

    entries: dict[str, str] = {}
    seen: set[str] = set()
    waiting = [(name, True) for name in names]
    while waiting:
        name, needed = waiting.pop()
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key in seen:
            continue
        seen.add(key)
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            if needed:
                raise LookupError(name) from None
            continue  # for another platform or Python
        for file in distribution.files or ():
            top = file.parts[0]
            if top in ("..", "__pycache__") or top.endswith((".dist-info", ".egg-info", ".pth", ".data")):
                continue
            entries[top] = os.path.realpath(str(distribution.locate_file(top)))
        for requirement in distribution.requires or ():
            match = re.match(r"[A-Za-z0-9._-]+", requirement)
            if match and "extra ==" not in requirement:
                waiting.append((match[0], ";" not in requirement))
    return entries


@dataclass
class HostPaths:
    """Real paths that the interpreter needs, folders to hide below them, and top-level links of the host's root."""

    readable: list[str]
    hidden: list[str]
    links: list[tuple[str, str]]


def host_paths() -> HostPaths:
    """For the running interpreter, which must have been started by `boot.command`: its path is the standard library."""
    wanted = [os.path.realpath(path) for path in sys.path if os.path.isdir(path)]
    wanted += _library_folders() + _prefix_libraries()
    wanted += [path for path in ("/usr/share/zoneinfo", "/etc/ld.so.cache", *DEVICES) if os.path.exists(path)]
    readable = [p for p in dict.fromkeys(wanted) if not any(p.startswith(other + "/") for other in wanted)]
    patterns = [f"{part}{kind}-packages" for part in ("", "python*/") for kind in ("site", "dist")]
    # Two levels: below a standard library, and below a folder that holds standard libraries.
    hidden = [hit for path in readable for pattern in patterns for hit in glob.glob(f"{path}/{pattern}")]
    links = [(top, os.readlink(top)) for top in ("/lib", "/lib64") if os.path.islink(top)]
    return HostPaths(readable, hidden, links)


def _library_folders() -> list[str]:
    """Where the system keeps shared libraries: multiarch folders, lib64, else /usr/lib and /lib themselves."""
    multiarch = sysconfig.get_config_var("MULTIARCH")
    folders = [f"{top}/{multiarch}" for top in ("/usr/lib", "/lib") if multiarch] + ["/usr/lib64", "/lib64"]
    found = list(dict.fromkeys(os.path.realpath(folder) for folder in folders if os.path.isdir(folder)))
    holds_libc = any(glob.glob(f"{folder}/libc.so*") for folder in found)
    return found if holds_libc else [*found, os.path.realpath("/usr/lib"), os.path.realpath("/lib")]


def _prefix_libraries() -> list[str]:
    """The interpreter's own lib folder where it brings libraries along, as conda does."""
    folder = os.path.realpath(os.path.join(sys.base_prefix, "lib"))
    if folder.startswith("/usr/"):
        return []
    others = [lib for lib in glob.glob(f"{folder}/lib*.so*") if not os.path.basename(lib).startswith("libpython")]
    return [folder] if others else []


def without(path: str, hidden: list[str]) -> list[str]:
    """Paths that cover `path` except the `hidden` folders below it."""
    if path in hidden:
        return []
    if not any(folder.startswith(path + "/") for folder in hidden):
        return [path]
    return [kept for entry in os.scandir(path) for kept in without(entry.path, hidden)]
