"""Model engines behind one interface (`base.py`). They import `generation` and `shared` only."""
