"""Shapes of published models, so that a run can be planned where their files are not.

    published("Qwen/Qwen2.5-3B-Instruct")      # model/assets/shapes/qwen2.5-3b.json

Each file holds the fields of the model's `config.json` that say its shape; none holds a weight.
"""

from pathlib import Path

from model.config import ModelConfig, from_hugging_face, read_json

FOLDER = Path(__file__).parent / "assets" / "shapes"
SAME_SHAPE = ("-instruct", "-base", "-coder", "-math", "-2507", "-thinking")
"""Parts of a name that say what a model was trained on, and nothing of its shape."""


def names() -> list[str]:
    return sorted(file.stem for file in FOLDER.glob("*.json"))


def published(name: str) -> ModelConfig | None:
    """The shape of the model that a path or a hub's name ends with; None for one not known here."""
    last = Path(name).name.lower()
    for part in SAME_SHAPE:
        last = last.replace(part, "")
    if last not in names():
        return None
    return from_hugging_face(read_json(FOLDER / f"{last}.json"))
