"""Draw all pictures anew: `python -m docs.pictures`."""

from pathlib import Path

from docs.pictures.hops import HOPS, draw_hops
from docs.pictures.models import PICTURES
from docs.pictures.scene import make_scene
from docs.pictures.svg import draw
from docs.pictures.timelines import TIMELINES, draw_timeline, table

FOLDER = Path(__file__).parent

if __name__ == "__main__":
    for name, picture in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw(make_scene(picture)), encoding="utf-8")
        print(f"docs/pictures/{name}.svg")
    for name, timeline in TIMELINES.items():
        (FOLDER / f"{name}.svg").write_text(draw_timeline(timeline), encoding="utf-8")
        print(f"docs/pictures/{name}.svg")
    for name in HOPS:
        (FOLDER / f"{name}.svg").write_text(draw_hops(name), encoding="utf-8")
        print(f"docs/pictures/{name}.svg")
    print("\nthe table of docs/pipelines.md:\n")
    print(table())
