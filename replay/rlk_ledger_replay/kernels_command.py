"""`kernels`: what the deterministic operators promise on this device, and whether they keep it."""

import click


@click.group()
def kernels() -> None:
    """Check the deterministic kernels on this device."""
