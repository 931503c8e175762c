"""python -m ipu_pipe COMMAND ..."""

from ipu_pipe import cli

if __name__ == "__main__":
    cli.run()
