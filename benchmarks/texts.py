"""Real text for benchmarks, without a download: this repository's own documentation."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def repository_text() -> str:
    """README and docs, one after the other, in the order of their names."""
    files = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]
    return "\n\n".join(path.read_text(encoding="utf-8") for path in files)


def paragraphs(shortest: int = 80, longest: int = 1200) -> list[str]:
    """Paragraphs of `repository_text` with that many characters."""
    return [text.strip() for text in repository_text().split("\n\n") if shortest <= len(text.strip()) <= longest]
