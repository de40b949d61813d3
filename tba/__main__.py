"""Entry of `python -m tba`: the same command line as `tba`."""

from tba.cli import app

if __name__ == "__main__":
    app(prog_name="tba")
