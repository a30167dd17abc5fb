"""The engine: owns the parts, passes one batch through them. It is built from the config in one place.

May import everything below it. Read `build.py`, then `engine.py`, `training.py`, and the stages in
`zero/`; `saving.py` with `training_state.py` for checkpoints, `export.py` for weights alone.
"""
