"""Everything that only a card can show, in one command under four minutes: `python tools/device_check`."""
