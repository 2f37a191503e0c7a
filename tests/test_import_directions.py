"""Imports run in one direction: AGENTS.md's table of floors is the rule, and every import of the product keeps it.

A room is a module or package directly below `slime_retool`, or `megatron_bridge` as a whole. It imports from lower
floors only, never from its own or a higher one, and no file is part of an import circle. All import statements count:
those inside functions and under TYPE_CHECKING too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FLOOR = re.compile(r"^    (?P<floor>\d+)  (?P<rooms>[a-z_]+(?: [a-z_]+)*)(?:  |$)", re.MULTILINE)
LEAVES = ("commands", "cli")


def floors() -> dict[str, int]:
    """Room -> floor, as AGENTS.md shows them."""
    lines = FLOOR.finditer((ROOT / "AGENTS.md").read_text(encoding="utf-8"))
    return {room: int(line["floor"]) for line in lines for room in line["rooms"].split()}


def modules() -> dict[str, Path]:
    paths = [*(ROOT / "slime_retool").rglob("*.py"), *(ROOT / "megatron_bridge").rglob("*.py")]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def room_of(module: str) -> str | None:
    """None for the empty package at the top."""
    package, _, rest = module.partition(".")
    return package if package == "megatron_bridge" else rest.split(".")[0] or None


def imports_of(module: str, known: dict[str, Path]) -> Iterator[str]:
    """The product's modules that one of them imports from."""
    path = known[module]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            names = [f"{source}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            # `from package.module import name` names a module or something in it.
            while name and name not in known:
                name = name.rpartition(".")[0]
            if name:
                yield name


def arrows() -> dict[str, set[str]]:
    known = modules()
    return {name: set(imports_of(name, known)) - {name} for name in known}


def upward(arrows: dict[str, set[str]], floors: dict[str, int]) -> list[str]:
    """Imports between rooms that do not lead to a lower floor."""
    found = []
    for module, imported in arrows.items():
        for other in imported:
            here, there = room_of(module), room_of(other)
            if None not in (here, there) and here != there and floors[here] <= floors[there]:
                found.append(f"{module} -> {other}")
    return sorted(found)


def circle(arrows: dict[str, set[str]]) -> list[str]:
    """Files that import each other in a circle; none where there is no circle."""
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_import_leads_up_and_none_runs_in_a_circle():
    assert upward(arrows(), floors()) == []
    assert circle(arrows()) == []


def test_every_room_has_its_floor():
    rooms = {room_of(module) for module in modules()} - {None}
    assert rooms == floors().keys()


def test_nobody_imports_a_command():
    users = {module for module, imported in arrows().items() if any(room_of(name) in LEAVES for name in imported)}
    assert {room_of(module) for module in users} <= set(LEAVES)


def test_the_rule_finds_a_wrong_import():
    """The proofs above would be empty if a wrong import could not be found."""
    assert upward({"slime_retool.trainer.core": {"slime_retool.rollout.hooks"}}, floors()) != []
    assert upward({"slime_retool.config.config": {"slime_retool.train"}}, floors()) != []
    assert upward({"slime_retool.train": {"slime_retool.config.config"}}, floors()) == []


def test_every_folder_of_modules_is_a_package():
    """setuptools leaves others out of what `pip install .` installs."""
    folders = {path.parent for path in modules().values()}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


if __name__ == "__main__":
    found = arrows()
    count = sum(map(len, found.values()))
    print(f"{count} imports: {len(upward(found, floors()))} lead up, {len(circle(found))} files are in a circle")
