"""The five lectures that plait came from, reproduced: a file per exhibit, `python -m examples.lectures` for all."""
