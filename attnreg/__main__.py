"""`python -m attnreg` is `attnreg`."""

from .cli import app

app(prog_name="attnreg")
